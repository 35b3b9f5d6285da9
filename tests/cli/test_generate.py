"""`infinity generate`: a tiny model's answers. Trusted: transformers' generate in memory. Real files."""

import json

import pytest
import torch

from infinity import __main__ as cli
from words import tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.disk
CHAT = [{"role": "user", "content": "who sat"}]


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=24,
        max_position_embeddings=64,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def run(base, prompts, *more, folder):
    (folder / "prompts.jsonl").write_text("".join(f"{line}\n" for line in prompts))
    out = folder / "answers.jsonl"
    asked = ["--model", base, "--prompts", folder / "prompts.jsonl", "--out", out, "--host-memory", "2MiB"]
    code = cli.main(["generate", *map(str, asked), "--nvme", str(folder), "--max-new-tokens", "6", *more])
    return code, [json.loads(line) for line in out.read_text().splitlines()] if code == 0 else []


def test_answers_are_those_of_generate_in_memory_in_the_order_of_the_prompts(base, tmp_path, capsys):
    said = [{"prompt": "the cat sat"}, {"messages": CHAT}, {"prompt": "a dog ran to"}]
    code, answers = run(base, map(json.dumps, said), "--batch", "1", folder=tmp_path)
    assert code == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    words = transformers.AutoTokenizer.from_pretrained(base)
    for one, answer in zip(said, answers, strict=True):
        ids = words(one["prompt"])["input_ids"] if "prompt" in one else None
        ids = ids or words.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]
        tokens = model.generate(
            torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=words.eos_token_id
        )
        completion = words.decode(tokens[0, len(ids) :], skip_special_tokens=True)
        assert answer == {**one, "completion": completion}
    figures = capsys.readouterr().err
    assert "3 prompts of" in figures
    assert "a pass over the weights" in figures
    assert "bound: " in figures


def test_batches_chunks_sampling_and_keys_and_values_in_a_share_work_together(base, tmp_path):
    prompts = [json.dumps({"prompt": " ".join(["the"] * (1 + one))}) for one in range(3)]
    options = [
        "--batch",
        "2",
        "--prefill",
        "2",
        "--temperature",
        "0.9",
        "--top-p",
        "0.8",
        "--kv-memory",
        "64KiB",
    ]
    code, answers = run(base, prompts, *options, folder=tmp_path)
    assert code == 0
    assert [one["prompt"].count("the") for one in answers] == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompts", "options", "why"),
    [
        ([], [], "holds no prompt"),
        (["the cat"], [], "line 1: not JSON"),
        (['{"text": "the"}'], [], 'line 1: expected an object with "prompt"'),
        (['{"prompt": ""}'], [], "line 1: no token in it"),
        (['{"prompt": "%s"}' % ("the " * 60)], [], "more than the 64 positions"),
        (['{"prompt": "the"}'], ["--top-p", "2"], "--top-p is above 0 and at most 1"),
        (['{"prompt": "the"}'], ["--temperature", "0"], "--temperature is above 0"),
        (['{"prompt": "the"}'], ["--batch", "0"], "at least 1"),
        (['{"prompt": "the"}'], ["--out", "."], "--out . exists, and is never overwritten"),
    ],
)
def test_bad_input_is_refused_by_name_before_weights_are_read(base, tmp_path, capsys, prompts, options, why):
    code, _ = run(base, prompts, *options, folder=tmp_path)
    assert code == 1
    assert why in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()
