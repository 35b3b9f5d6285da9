"""Updates beside computing: real kernels on small tiles; how fast they are is not asked."""

from infinity.bench.engine.beside import LaneWork


def test_tiles_are_updated_in_turn_until_it_is_stopped():
    work = LaneWork(tiles=2, numel=4096)
    assert work.rate(seconds=0.05) > 0
    assert all(m.abs().sum() > 0 for _, _, m, _ in work._tiles)
    work.start()
    assert work.stop() >= 0
    assert not work._thread.is_alive()
