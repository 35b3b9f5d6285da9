"""What the engine does on CUDA beside plain training. Runs where a GPU is (python3 dev.py gpu);
nothing is faked.

Trusted: torch on the same GPU, the same training with another room on the device, and the engine on the CPU.
"""

import gc
import json
import subprocess
import sys

import pytest
import torch
import transformers

import infinity
import models
import simulated_cases
from infinity import AdamW, Init, stats
from infinity.device import direct
from infinity.engine.engine import engine_of_model
from on_cuda import repeatable_kernels
from trainers import ADAM, ROWS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),
]

SETTINGS = {"lr": 1e-2, "weight_decay": 0.1}
WIDE = {**models.SIZES, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}


@pytest.fixture(autouse=True)
def repeatable(monkeypatch):
    with repeatable_kernels(monkeypatch):
        yield


class Training:
    """A small Llama, offloaded."""

    def __init__(self, folder, room="64MiB", update="backward", clips=(), **init):
        given = {"nvme": folder, "host_memory": "64MiB", "device": "cuda", "device_memory": room, **init}
        self.model = models.build("llama", **given).to("cuda").train()
        self.optimizer = AdamW(self.model.parameters(), update=update, **SETTINGS, **dict(clips))
        self.losses = []

    def backward(self):
        ids = models.batch(len(self.losses)).cuda()
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.losses.append(loss.item())

    def steps(self, count):
        for _ in range(count):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def result(self):
        """Losses and weights."""
        return self.losses, {name: one.cpu() for name, one in self.model.state_dict().items()}


def assert_same(one, other):
    assert one[0] == other[0]
    assert [name for name, value in one[1].items() if not torch.equal(value, other[1][name])] == []


def folders(folder):
    """Two folders in it."""
    for name in ("one", "other"):
        (folder / name).mkdir()
    return folder / "one", folder / "other"


# What lives on the device


def test_a_device_is_handed_over_between_steps_and_training_goes_on_asleep_and_awake(folder):
    one, other = folders(folder)
    expected = Training(one).steps(9).result()
    before = torch.cuda.memory_allocated()
    training = Training(other).steps(3)
    assert stats(training.model).device_nbytes > 0
    assert infinity.sleep(training.model) > 0
    assert stats(training.model).device_nbytes == 0
    own = sum(one.nbytes for one in training.model.buffers())
    placeholders = 512 * sum(1 for _ in training.model.parameters())
    assert torch.cuda.memory_allocated() - before <= own + placeholders + (1 << 16)
    training.steps(2)
    assert stats(training.model).device_nbytes == 0
    infinity.wake(training.model)
    training.steps(4)
    assert stats(training.model).device_nbytes > 0
    assert_same(training.result(), expected)


def test_after_the_device_ran_out_of_memory_nothing_lives_there_and_the_warning_says_so(folder, caplog):
    one, other = folders(folder)
    expected = Training(one).steps(5).result()
    training = Training(other).steps(3)
    assert stats(training.model).device_nbytes > 0
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    training.steps(1)
    assert stats(training.model).device_nbytes == 0
    assert "of device_memory=64.0 MiB" in caplog.text
    assert_same(training.steps(1).result(), expected)


STATES = [
    {"state_dtype": "bf16"},
    {"state_dtype": "int8"},
    {"state_dtype": "int4", "master_dtype": "fp24"},
    {"dtype": "fp32"},
]


@pytest.mark.parametrize("state", STATES, ids=lambda state: "-".join(state.values()))
def test_states_of_every_dtype_train_to_the_same_bits_in_every_device_memory(folder, state):
    one, other = folders(folder)
    assert_same(
        Training(one, "160KiB", **state).steps(4).result(),
        Training(other, "64MiB", **state).steps(4).result(),
    )


@pytest.mark.parametrize("room", ["160KiB", "64MiB"])
def test_updates_that_are_divided_leave_the_bits_of_those_in_the_backward(folder, room):
    one, other = folders(folder)
    found = Training(one, room, "auto").steps(5).result()
    assert_same(found, Training(other, "160KiB", "backward").steps(5).result())


@pytest.mark.parametrize("max_norm", [1e9, 0.05])
def test_updates_before_the_norm_is_known_leave_the_bits_of_those_after_it(folder, max_norm):
    one, other = folders(folder)
    clips, small = {"max_norm": max_norm, "speculate": False}, {"room": "160KiB", "host_memory": "256KiB"}
    plain = Training(one, update="forward", clips=clips, **small).steps(5)
    ahead = Training(other, update="forward", clips={**clips, "speculate": True}, **small).steps(5)
    assert sum(engine_of_model(ahead.model).speculation.counts.values()) > 0
    assert_same(ahead.result(), plain.result())


# Frozen weights


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("room", ["512KiB", "64MiB"])
def test_weights_that_we_pack_are_widened_on_the_device_to_what_the_cpu_widens_them_to(folder, kind, room):
    torch.manual_seed(0)
    path = folder / "model"
    sizes = {**models.SIZES, "hidden_size": 128, "intermediate_size": 320}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).bfloat16().save_pretrained(path)
    given = {"nvme": folder, "host_memory": "2MiB", "device": "cuda", "device_memory": room}
    with Init(frozen_dtype=kind, frozen=True, **given):
        ours = transformers.AutoModelForCausalLM.from_pretrained(path)
    ours.to("cuda").eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    plain.load_state_dict({name: one.cpu() for name, one in ours.state_dict().items()})
    plain.cuda().eval()
    with torch.no_grad():
        for number in range(3):
            ids = models.batch(number).cuda()
            assert torch.equal(ours(input_ids=ids).logits, plain(input_ids=ids).logits)


def test_generation_whose_weights_fit_the_device_uploads_none_for_a_further_token(folder):
    with Init(frozen=True, nvme=folder, host_memory="64MiB", device="cuda", device_memory="64MiB"):
        model = transformers.AutoModelForCausalLM.from_pretrained(simulated_cases.checkpoint().name)
    model.to("cuda").eval()
    ids = models.batch(0).cuda()
    chosen = {"do_sample": False, "pad_token_id": 0}
    model.generate(ids, max_new_tokens=8, **chosen)
    before = stats(model)
    model.generate(ids, max_new_tokens=8, **chosen)
    done = stats(model).since(before)
    assert (done.uploaded_nbytes, done.nvme_read_nbytes) == (0, 0)


# Activations


def test_a_budget_of_activations_is_kept_at_every_setting(folder):
    """Allocations of a step, beside those of the engine, which its ledger counts."""
    batch = models.batch(0, rows=4, length=512).cuda()

    def peak_of(budget, place):
        with Init(
            nvme=None, host_memory="2GiB", device="cuda", device_memory="512MiB", activation_memory=budget
        ):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE))
        model.to("cuda").train()
        optimizer = AdamW(model.parameters(), update="backward", **SETTINGS)
        for number in range(4):
            if number == 3:
                gc.collect()
                torch.cuda.synchronize()
                room = engine_of_model(model).device.room
                before = torch.cuda.memory_allocated() - room.ledger.held_nbytes
                torch.cuda.reset_peak_memory_stats()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated() - before
        plan = engine_of_model(model).activations.decisions[-1].plan
        engine_of_model(model).close()
        return most - stats(model).device_peak_nbytes, plan.peak_nbytes

    _, all_kept = peak_of("8GiB", folder)
    for share in (0.4, 0.7, 1.0):
        budget = int(share * all_kept)
        found, planned = peak_of(budget, folder)
        assert planned <= budget
        assert found <= budget, f"{found} bytes of activations in a budget of {budget}, planned {planned}"


def test_sparse_attention_by_flex_attention_computes_what_dense_attention_with_its_mask_does():
    config = transformers.LlamaConfig(
        **{**models.SIZES, "hidden_size": 128, "max_position_embeddings": 1024},
        attn_implementation="flex_attention",
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).cuda().eval()
    ids = models.batch(0, rows=2, length=512).cuda()
    torch.use_deterministic_algorithms(mode=False)
    sparse = infinity.SparseAttention(model, "bslongformer", block=16)
    with torch.no_grad():
        found = model(input_ids=ids).logits
        mask = sparse.blocks(512).repeat_interleave(16, 1).repeat_interleave(16, 2)[:1].cuda()
        sparse.remove()
        model.set_attn_implementation("sdpa")
        expected = model(input_ids=ids, attention_mask=(mask & mask.new_ones(512, 512).tril())[None]).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


# Files


def test_weights_that_kvikio_reads_to_the_device_have_the_same_bits(folder, monkeypatch):
    pytest.importorskip("kvikio")
    one, other = folders(folder)
    monkeypatch.setattr(direct, "_is_compatible_only", lambda _: False)
    begun = []
    begin = direct.DirectFiles.begin
    monkeypatch.setattr(
        direct.DirectFiles, "begin", lambda *given: begun.append(given[-1].numel()) or begin(*given)
    )
    small = {"room": "160KiB", "host_memory": "256KiB", "verify": "off"}
    expected = Training(one, **small).steps(3).result()
    assert_same(Training(other, aio="gds", **small).steps(3).result(), expected)
    assert sum(begun) > 0


# Programs


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_trainer_trains_on_cuda(folder, dtype):
    with Init(nvme=folder, host_memory="64MiB", device="cuda", device_memory="64MiB", dtype=dtype):
        torch.manual_seed(0)
        model = models.MODELS["llama"]()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"), max_steps=6, per_device_train_batch_size=2, max_grad_norm=0.5,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, **{dtype: True},
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=ROWS,
        optimizer_cls_and_kwargs=(AdamW, ADAM),
        callbacks=[infinity.huggingface.TrainerCallback()],
    )
    torch.use_deterministic_algorithms(mode=False)
    trainer.train()
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    assert len(losses) == 6
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_command_trains_on_cuda(folder, dtype):
    out = folder / "run"
    shape = ["--preset", "1m", "--steps", "6", "--batch", "2", "--sequence", "128", "--lr", "0.003"]
    place = ["--nvme", str(folder), "--host-memory", "64MiB", "--device", "cuda", "--out", str(out)]
    command = [sys.executable, "-m", "infinity", "train", *shape, *place, "--dtype", dtype]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    losses = [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
