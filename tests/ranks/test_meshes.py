"""Models whose parameters are DTensors, on a mesh of data and tensor dimensions: real processes over gloo.
What they do is in mesh_run.py.

Losses, weights and moments are compared bit for bit with the same parallel model in memory. Nothing is faked.
"""

import importlib.util
import re

import pytest

from answers import answering, read_answers
from launches import forked
from places import SUPPORT

EXACT = ["bf16, tight, clip_grad_norm_, checkpointed", "fp32, replicated, taken in, looked at, max_norm"]
MORE = [
    *("bf16, checkpointed, whole, accumulated, tight", "bf16, looked at, tight, in the backward"),
    *("bf16, stage 1, max_norm", "fp32, frozen, tight", "fp32, tied, tight, max_norm"),
    *("fp32, tight, clip_grad_norm_, accumulated", "Llama, fp32, clip_grad_norm_"),
    *("Llama, bf16, tight, max_norm", "Mistral, bf16, tight", "Llama, planned, bf16, tight, max_norm"),
    *("Qwen2, planned, fp32, tight, clip_grad_norm_", "Qwen3, planned, bf16, tight, max_norm"),
    *("Gemma, planned, fp32, tight, max_norm", "Mixtral, planned, fp32, tight, max_norm"),
    *("bf16, checkpointed, in parts, tight", "bf16, int8 moments, tight, max_norm"),
    *("bf16, int4 moments, tight, accumulated", "fp32, bf16 moments, tight, clip_grad_norm_"),
]
DIVIDED = [
    *("fp32, tight, max_norm", "bf16, tight, clip_grad_norm_, checkpointed", "bf16, accumulated, max_norm"),
    *("fp32, replicated, taken in, looked at, clip_grad_norm_", "bf16, stage 1, max_norm"),
    *("Llama, planned, bf16, tight, max_norm", "fp32, checkpointed, in parts, tight, max_norm"),
    "fp32, int4 moments, tight",
]
BOTH = ["wrong", "states", "overflow", "edits", "saves", "durable", "autotp", "megatron"]
ADAPTED = ["adapters"] if importlib.util.find_spec("peft") else []
ALONE = ["exported", "reduced by hand", "generated", "mesh_param", "fused", *ADAPTED]
LAUNCHES = {
    "tp 2": (2, 1, [*EXACT, *BOTH, "paths"]),
    "more": (2, 1, [*MORE, *ALONE, "saved by dcp", "loaded from dcp"]),
    "dying": (2, 1, ["dying"]),
    "dp 2 x tp 2": (4, 2, [*DIVIDED, *BOTH, "saved by dcp", "loaded from dcp", "fused", *ADAPTED, "paths"]),
}
"""Ranks, how many of them have different data, and cases of each launch; "paths" is the last, as ranks that
disagree may not meet again.
"""

pytestmark = [pytest.mark.multi, pytest.mark.disk]


def of(*cases, first="tp 2"):
    """Return launches with each of their cases that is asked for, as parameters; those that train without."""
    return [
        pytest.param(launch, case, id=f"{launch}: {case}", marks=[] if launch == first else pytest.mark.slow)
        for launch, (_, _, known) in LAUNCHES.items()
        for case in known
        if case in cases or (not cases and ("fp32" in case or "bf16" in case))
    ]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return a function that says what each rank of a launch answers in a case."""

    def launched(launch):
        ranks, data, cases = LAUNCHES[launch]
        folder = tmp_path_factory.mktemp("mesh")
        forked(ranks, SUPPORT / "mesh_run.py", folder, data, *cases)
        return read_answers(folder, ranks, missing=True)

    return answering(launched)


@pytest.mark.parametrize(("launch", "case"), of())
def test_a_parallel_model_trains_bit_for_bit_as_in_memory(answers, launch, case):
    given = answers(launch, case)
    assert [one["different"] for one in given] == [[]] * len(given)
    divided = "checkpointed" in case and "whole" not in case
    assert all(one["in parts"] == divided for one in given)
    assert all(one["held"][0] == one["held"][1] for one in given), "layers are those of a rank's own parts"
    if "tight" in case:
        assert min(one["nvme"] for one in given) > 0


@pytest.mark.parametrize(("launch", "case"), [one for one in of() if "norm" in one.values[1]])
def test_every_rank_has_the_norm_of_the_whole_model(answers, launch, case):
    given = answers(launch, case)
    assert len({str(one["norms"]) for one in given}) == 1
    assert max(one["norms differ"] for one in given) < 1e-12
    if "max_norm" in case:
        assert all(one["norms"][0] == one["norms"][1] for one in given)


@pytest.mark.parametrize(("launch", "case"), of("wrong"))
def test_what_no_mesh_can_have_is_refused_by_name_on_all_ranks(answers, launch, case):
    given = answers(launch, case)
    for name in {*given[0]} - {"one rank alone"}:
        assert len({re.sub(r"\d+", "N", one[name]) for one in given}) == 1, "all ranks say the same"
    for one in given:
        assert one["partial"].startswith("UnsupportedError: Holder.part0 is a DTensor placed as P")
        assert "whose dimension 0 has the ranks" in one["two meshes"]
        assert "along the data's dimensions Infinity divides them by itself" in one["over data"]
        assert "Holder.part0 is a DTensor" in one["no mesh"]
        assert "Init knows no mesh" in one["no mesh"]
        assert one["missing"].startswith("ConfigError: data='dq': the mesh has the dimensions ('dp', 'tp')")
        assert one["not said"].startswith("ConfigError: mesh has the dimensions ('dp', 'tp')")
        assert one["twice"].startswith("ConfigError: data=('dp', 'dp')")
        assert one["without"].startswith("ConfigError: Init(data='dp') goes with mesh=")
        assert one["both"].startswith("ConfigError: Init(data='dp') goes with mesh=")
        assert "whose dimensions have names" in one["unnamed"]
        assert one["descending"].startswith("ConfigError: the mesh of ranks [[")
        assert "does not ascend along dimension 'tp'" in one["descending"]
        assert "Holder.part0 is a DTensor: the mesh of ranks [" in one["on descending"]
        assert one["pipeline"].startswith("ConfigError: mesh and pipeline_group have ranks [")
        assert "Muon needs the whole matrix" in one["muon"]


@pytest.mark.parametrize(("launch", "case"), of("wrong"))
def test_what_one_rank_of_a_mesh_refuses_ends_the_building_on_those_beside_it(answers, launch, case):
    for rank, one in enumerate(answers(launch, case)):
        if rank % 2:
            assert one["one rank alone"].startswith("UnsupportedError: Holder.part0 is a DTensor placed as P")
        else:
            assert one["one rank alone"].startswith("RanksError: rank 0 of 2")
            assert "UnsupportedError: Holder.part0 is a DTensor placed as P" in one["one rank alone"]


@pytest.mark.parametrize(("launch", "case"), of("wrong"))
def test_uses_of_a_distributed_parameter_that_would_be_lost_are_refused(answers, launch, case):
    for one in answers(launch, case):
        assert "what is given for it an ordinary tensor" in one["assigned"]
        assert "what is given for it an ordinary tensor" in one["plain state"]
        assert one["released"].startswith("NotResidentError: parameter 'part0' is not resident")
        assert one["in place"].startswith("NotResidentError: parameter 'part0' is not resident")
        assert "inside `with infinity.Init(mesh=" in one["parallelized later"]


@pytest.mark.parametrize(("launch", "case"), of("states"))
def test_state_of_distributed_parameters_is_distributed(answers, launch, case):
    for one in answers(launch, case):
        assert one["problems"] == []
        assert one["in place"].startswith("UnsupportedError: zero_() on a copy of an optimizer's state")
        assert one["unwritten"].startswith("UnsupportedError: head.weight was changed inside")


@pytest.mark.parametrize(("launch", "case"), of("edits"))
def test_an_edit_by_hand_is_kept_whole_or_refused(answers, launch, case):
    for one in answers(launch, case):
        assert one["wrong"] == []
        assert "what is given for it an ordinary tensor" in one["local as data"]
        assert "the ranks have made different values of it" in one["copies apart"]
        assert "has made different values on them" in one["gradients apart"]
        assert one["released as state"].startswith("NotResidentError: parameter '1.weight' is not resident")
        assert "what is given for it an ordinary tensor" in one["ordinary as state"]
        assert all("was changed in place by a view of it" in text for text in one["kept"])
        assert one["in slices"].startswith("UnsupportedError: tile_above='1KiB' with a mesh")


@pytest.mark.parametrize(("launch", "case"), of("overflow"))
def test_an_overflow_of_one_rank_leaves_the_step_out_on_all(answers, launch, case):
    for one in answers(launch, case):
        assert one == {"scales": [256.0, 128.0, 128.0, 256.0], "steps": [3]}


@pytest.mark.parametrize(("launch", "case"), of("saves"))
def test_a_checkpoint_loads_on_any_mesh_and_without_one(answers, launch, case):
    for one in answers(launch, case):
        assert one["wrong"] == []


@pytest.mark.parametrize(("launch", "case"), of("saves"))
def test_a_checkpoint_that_cannot_be_loaded_or_saved_is_refused_on_all_ranks_alike(answers, launch, case):
    ranks, given = LAUNCHES[launch][0], answers(launch, case)
    assert all(one == given[0] for one in given)
    one = given[0]
    assert "infinity.save: the ranks name different folders: rank 0 (" in one["other folders"]
    assert one["left"] == []
    assert "infinity.load: the ranks name different folders: rank 0 (" in one["other folder"]
    assert "the ranks find different manifests of a checkpoint" in one["other manifests"]
    assert f"{ranks - 1} (" in one["other manifests"]
    assert one["no checkpoint"].startswith("FileNotFoundError: [Errno 2] there is no such folder")
    assert one["another model"].startswith("CheckpointError: ")
    assert "nothing was loaded" in one["another model"]
    assert "of another shape or type: embedding.weight: F32 [61, 64], expected F32 [8, 64]" in one["shapes"]
    assert f"TensorFileError: {one['folder']}/moments-rank0000{ranks - 1}-00001.safetensors: " in one["cut"]
    assert f"{one['folder']}/manifest.json: the manifest cannot be read" in one["cut manifest"]
    assert not one["changed"]
    assert "state_dtype='int8' keeps moments in blocks of 256 elements of that part" in one["int8"]
    assert one["int8 of one element"].startswith("UnsupportedError: 0.weight is a DTensor")
    assert one["given"].startswith("UnsupportedError: extra['mine'] is a DTensor")
    assert one["deepspeed"].startswith("UnsupportedError: a checkpoint of DeepSpeed: the model is on a mesh")


@pytest.mark.parametrize(("launch", "case"), of("durable"))
def test_a_durable_run_and_a_snapshot_of_it_go_on_on_their_mesh(answers, launch, case):
    for one in answers(launch, case):
        assert one == {"wrong": []}


@pytest.mark.parametrize(("launch", "case"), of("saved by dcp"))
def test_checkpoints_of_torch_have_the_whole_model(answers, launch, case):
    for one in answers(launch, case):
        assert one == {"lost": [], "goes on": True}


@pytest.mark.parametrize(("launch", "case"), of("exported"))
def test_a_model_that_transformers_divides_is_exported_as_by_ranks_that_have_it_whole(answers, launch, case):
    for one in answers(launch, case):
        assert (one["different"], one["names"]) == ([], True)


@pytest.mark.parametrize(("launch", "case"), of("exported"))
def test_an_export_that_one_rank_cannot_read_for_fails_at_once_on_all_with_its_reason(answers, launch, case):
    said = [one["one rank"] for one in answers(launch, case)]
    assert [left for _, left in said] == [False] * len(said)
    assert said[0][0].startswith(
        "RanksError: rank 0 of 2 (tp=0): reading model.layers.0.mlp.experts.gate_up_pr"
    )
    assert "rank 1 (tp=1): OSError: the disk of one rank" in said[0][0]
    assert said[1][0] == "OSError: the disk of one rank"


@pytest.mark.parametrize(("launch", "case"), of("loaded from dcp"))
def test_checkpoints_of_torch_load_on_any_mesh_with_the_moments(answers, launch, case):
    for one in answers(launch, case):
        assert one["lost"] == []
        assert "Adam's moments are loaded into AdamW or Adam, and the optimizer is SGD" in one["kind"]
        assert "FileNotFoundError" in one["none"]
        assert "has no moments (NAME.exp_avg)" in one["no moments"]
        assert one["fits"].startswith("CheckpointError: ")
        assert "embedding.bias" in one["fits"]


@pytest.mark.parametrize(("launch", "case"), of("megatron"))
def test_layers_that_an_mpu_divides_train_as_the_whole_model_and_save_it_whole(answers, launch, case):
    ranks, data, _ = LAUNCHES[launch]
    for rank, one in enumerate(answers(launch, case)):
        assert one["wrong"] == []
        assert one["sizes"] == [2 * data, rank // (ranks // data)]
        assert one["refused"][0].startswith("UnsupportedError: infinity.save_pretrained: up.weight is a part")
        assert one["refused"][1].startswith("UnsupportedError: infinity.stream_weights: up.weight is a part")
        assert "that the ranks [" in one["refused"][2]


@pytest.mark.parametrize(("launch", "case"), of("autotp"))
def test_autotp_size_divides_a_llama_by_its_plan(answers, launch, case):
    ranks, data, _ = LAUNCHES[launch]
    for rank, one in enumerate(answers(launch, case)):
        for found, expected in zip(one["found"], one["expected"], strict=True):
            assert found == pytest.approx(expected, rel=1e-5)
        assert one["sizes"] == [2 * data, 8 // 2 // data, ranks // data, rank // (ranks // data)]
        assert len(one["divided"]) == 2 * 7 + 2
        assert one["loaded"]
        assert one["unplanned"].startswith("ConfigError: tensor_parallel.autotp_size: no model of trans")
        assert one["both"].startswith("ConfigError: tensor_parallel.autotp_size=2 and mesh_param")


@pytest.mark.parametrize(("launch", "case"), of("mesh_param"))
def test_mesh_param_says_how_many_ranks_share_a_sequence(answers, launch, case):
    for one in answers(launch, case):
        assert len(one["found"]) == 4
        assert all(way == one["found"][0] for way in one["found"])
        assert one["numbers"].startswith("ConfigError: mesh_param=(2, 2): 2 sequences x 2 ranks")
        assert "says that 1 ranks share a sequence, the configuration 2" in one["other"]
        assert one["kind"].startswith("ConfigError: mesh_param='all': expected (data, sequences)")
        assert "has no get_data_parallel_group(): expected Megatron's functions" in one["no mpu"]
        assert one["both"].startswith("ConfigError: mpu and mesh_param: each says which ranks share data")


@pytest.mark.parametrize(("launch", "case"), of("generated"))
def test_a_divided_model_generates_the_tokens_of_memory_from_a_prompt_in_chunks_and_a_static_cache(
    answers, launch, case
):
    assert answers(launch, case) == [{"grows": True, "static": True}] * LAUNCHES[launch][0]


@pytest.mark.parametrize(("launch", "case"), of("reduced by hand"))
def test_a_collective_on_an_offloaded_gradient_is_refused(answers, launch, case):
    for one in answers(launch, case):
        assert "UnsupportedError" in one["error"]
        assert "a collective of torch.distributed on an offloaded gradient" in one["error"]


@pytest.mark.parametrize(("launch", "case"), of("fused"))
def test_fused_weights_of_whose_chunks_ranks_have_parts_are_saved_and_loaded_anywhere(answers, launch, case):
    for one in answers(launch, case):
        assert one["wrong"] == []
        assert one["uneven"].startswith("UnsupportedError: uneven is a DTensor of (6, 4) placed as")
        assert "_StridedShard whose chunks all ranks divide evenly" in one["uneven"]
        assert one["load_dcp"].startswith("UnsupportedError: rows is a DTensor placed as")


@pytest.mark.parametrize(("launch", "case"), of("adapters"))
def test_adapters_of_divided_layers_are_saved_whole_and_loaded_and_merging_them_is_refused_by_name(
    answers, launch, case
):
    for one in answers(launch, case):
        assert one["divided"] == 2 * len(("q", "down"))
        assert (one["lost"], one["alone"], one["loaded"], one["learnt"]) == ([], [], [], True)
        assert one["merged"].startswith("UnsupportedError: merging adapters: the model is on a mesh")
        assert "PEFT has made adapters for this rank's part of a weight of (64, 64)" in one["other order"]
        assert not one["left"]


@pytest.mark.parametrize(("launch", "case"), of("paths"))
def test_ranks_that_use_other_modules_are_named_by_their_places_with_the_first_use_that_differs(
    answers, launch, case
):
    for rank, one in enumerate(answers(launch, case)):
        row = f"dp={rank // 2}, " if LAUNCHES[launch][1] > 1 else ""
        first = f"{row}tp=0" + (", rank 2 of the world" if rank > 1 else "")
        assert f"are about to do different things: rank 0 ({first}): use 2 of a" in one["tensor"]
        assert "use 2 of a step, forward second; rank 1 (" in one["tensor"]
        assert f"({row}tp=1" in one["tensor"]
        assert "use 2 of a step, forward third. Likely cause" in one["tensor"]
        if "data" in one:
            assert f"rank 0 (dp=0, tp={rank % 2}" in one["data"]
            assert f"rank 1 (dp=1, tp={rank % 2}, rank {2 + rank % 2} of the world): " in one["data"]


@pytest.mark.slow
def test_a_rank_that_dies_is_named_by_its_place_where_ranks_beside_each_other_meet(answers):
    (left,) = answers("dying", "dying")
    assert left["error"].startswith("RanksError: rank 0 of 2 (tp=0): ")
    assert "rank 1 (tp=1) did not answer" in left["error"]
