"""Lightning's Trainer, unmodified, on a LightningModule that builds its model in Init; where it is installed.

Trusted: the plain loop on the same model, which other tests hold against the reference recipe.
"""

import pytest
import torch
from torch.utils.data import DataLoader

import infinity
import models

lightning = pytest.importorskip("lightning")

pytestmark = [
    pytest.mark.disk,
    pytest.mark.usefixtures("repeatable"),
    pytest.mark.filterwarnings("ignore"),  # of Lightning's own, about workers and loggers
]


def build(folder, seed=0, dtype="bf16"):
    torch.manual_seed(seed)
    with infinity.Init(nvme=str(folder), host_memory="1MiB", dtype=dtype):
        return models.MODELS["llama"]()


class Module(lightning.LightningModule):
    """As users write it: nothing of it is Infinity's but Init and AdamW."""

    def __init__(self, folder, **options):
        super().__init__()
        self.folder, self.options = folder, options
        self.model, self.losses = None, []

    def configure_model(self):
        if self.model is None:
            self.model = build(self.folder, **self.options)

    def configure_optimizers(self):
        optimizer = infinity.AdamW(self.model.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 3)]

    def training_step(self, ids, _):
        loss = self.model(input_ids=ids, labels=ids).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, ids, _):
        self.log("held", self.model(input_ids=ids, labels=ids).loss)


def loader(number, rows=12):
    return DataLoader(models.batch(number, rows=rows), batch_size=2)


def fit(folder, module, checkpoint=None, **options):
    options = {"max_epochs": 2, "precision": "32-true", "gradient_clip_val": 0.5, **options}
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **options,
    )
    trainer.fit(module, loader(0), loader(1, rows=4), ckpt_path=checkpoint)
    return trainer


def by_hand(folder, accumulate=1, dtype="bf16", clip=0.5):
    model = build(folder, dtype=dtype)
    optimizer = infinity.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 3)
    losses = []
    for _ in range(2):
        for number, ids in enumerate(loader(0), 1):
            loss = model(input_ids=ids, labels=ids).loss
            (loss / accumulate).backward()
            losses.append(loss.item())
            if number % accumulate == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
    return model, losses


def different(ours, others):
    found, expected = ours.state_dict(), others.state_dict()
    return [name for name in expected if not torch.equal(found[name], expected[name])]


@pytest.mark.parametrize(
    ("options", "accumulate", "dtype"),
    [
        ({}, 1, "bf16"),
        ({"accumulate_grad_batches": 3}, 3, "bf16"),
        ({"precision": "bf16-mixed"}, 1, "bf16"),
        ({}, 1, "fp32"),
    ],
    ids=["clipped", "accumulated", "bf16-mixed", "in fp32"],
)
def test_losses_and_weights_are_those_of_the_plain_loop(folder, options, accumulate, dtype):
    module = Module(folder, dtype=dtype)
    trainer = fit(folder, module, enable_checkpointing=False, **options)
    model, losses = by_hand(folder, accumulate, dtype)
    assert module.losses == losses
    assert different(module.model, model) == []
    assert torch.isfinite(trainer.callback_metrics["held"])
    assert infinity.stats(module.model).nvme_read_nbytes > 0


def test_a_checkpoint_of_lightning_resumes_with_the_bits_of_a_run_that_never_stopped(folder):
    """Its checkpoints hold state_dicts, masters not among them: those of infinity.save do."""
    whole = Module(folder, dtype="fp32")
    fit(folder, whole, max_epochs=1)
    (saved,) = folder.glob("checkpoints/*.ckpt")
    again = Module(folder, seed=1, dtype="fp32")
    fit(folder, again, max_epochs=2, checkpoint=str(saved))
    model, losses = by_hand(folder, dtype="fp32")
    assert whole.losses + again.losses == losses
    assert different(again.model, model) == []
