"""`infinity generate`: a tiny model's answers. Trusted: transformers' generate in memory. Real files."""

import json

import pytest
import torch

import quantised
from infinity import __main__ as cli
from infinity.cli.prompts import read_prompts
from words import tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.disk,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
LEAST = ["--host-memory", "2MiB", "--max-new-tokens", "2"]
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
    return code, [json.loads(line) for line in out.read_text().split("\n")[:-1]] if code == 0 else []


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


def test_adapters_answer_as_with_peft_in_memory(base, tmp_path, capsys):
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    adapters = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    adapters.save_pretrained(tmp_path / "adapter")
    said = {"prompt": "the cat sat on a mat"}
    code, (answer,) = run(base, [json.dumps(said)], "--adapter", str(tmp_path / "adapter"), folder=tmp_path)
    words = transformers.AutoTokenizer.from_pretrained(base)
    ids = torch.tensor([words(said["prompt"])["input_ids"]])
    model = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter"
    )
    tokens = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=1)
    expected = words.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
    assert (code, answer) == (0, {**said, "completion": expected})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "base", "--adapter", "base"], "holds no adapter_config.json. Name a folder that"),
        (
            ["--model", "adapter"],
            "holds PEFT's adapters, and no model. Name the model that they were trained",
        ),
        (["--model", "base", "--adapter", "adapter"], "does not fit the model"),
    ],
)
def test_adapters_in_the_wrong_place_are_told_where_they_belong(
    base, tmp_path, capsys, monkeypatch, arguments, says
):
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32, vocab_size=24
    )
    other = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"]),
    )
    other.save_pretrained(tmp_path / "adapter")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n')
    assert cli.main(["generate", *arguments, "--prompts", "prompts.jsonl", *LEAST]) == 1
    assert says in capsys.readouterr().err


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


def test_a_batch_in_tiles_and_chunks_that_the_budget_asks_for_gives_the_answers_of_whole_batches(
    base, tmp_path, capsys
):
    prompts = [
        json.dumps({"prompt": " ".join(["the cat sat", "a dog ran", "who"][:many])}) for many in (1, 3, 2)
    ]
    answers = []
    for options in (["--tile", "3"], ["--tile", "2"], ["--host-memory", "128KiB"]):
        (tmp_path / "answers.jsonl").unlink(missing_ok=True)
        code, said = run(base, prompts, "--batch", "3", *options, folder=tmp_path)
        assert code == 0
        answers.append((said, "a layer computed 2 at a time" in (err := capsys.readouterr().err), err))
    assert answers[0][0] == answers[1][0] == answers[2][0]
    assert [tiled for _, tiled, _ in answers[:2]] == [False, True]
    assert "at a time" in answers[2][2]


def test_answers_stop_at_each_end_that_the_model_names_and_padding_behind_it_is_not_counted(
    base, tmp_path, capsys
):
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    words = transformers.AutoTokenizer.from_pretrained(base)
    prompts = ["the cat sat", "a dog ran"]
    ids = torch.tensor([words(one)["input_ids"] for one in prompts])
    model.generation_config.eos_token_id = None
    endless = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)[:, 3:].tolist()
    end = next(one for one in endless[0] if one not in endless[1])
    model.generation_config.eos_token_id = [1, end]
    model.generation_config.save_pretrained(base)
    code, answers = run(
        base, [json.dumps({"prompt": one}) for one in prompts], "--batch", "2", folder=tmp_path
    )
    assert code == 0
    shorter = endless[0][: endless[0].index(end) + 1]
    assert len(shorter) < 6
    said = [words.decode(one, skip_special_tokens=True) for one in (shorter, endless[1])]
    assert [one["completion"] for one in answers] == said
    assert f"; {len(shorter) + 6} tokens in" in capsys.readouterr().err


def test_fp8_weights_with_block_scales_give_the_answers_of_transformers(folder, capsys):
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone converts fp8")
    path = quantised.fp8_llama(folder / "fp8")
    tokenizer().save_pretrained(path)
    more = ["--host-memory", "4MiB"]
    code, answers = run(path, [json.dumps({"prompt": "the cat sat"})], *more, folder=folder)
    assert code == 0, capsys.readouterr().err
    model = transformers.AutoModelForCausalLM.from_pretrained(path)
    words = transformers.AutoTokenizer.from_pretrained(path)
    ids = torch.tensor([words("the cat sat")["input_ids"]])
    tokens = model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=1)[0, ids.shape[1] :]
    assert answers[0]["completion"] == words.decode(tokens, skip_special_tokens=True)
    quantised.add_method(path, quant_method="gptq")
    (folder / "answers.jsonl").unlink()
    assert run(path, [json.dumps({"prompt": "the"})], folder=folder)[0] == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "quantized weights (gptq) cannot be used by this command" in said


def test_4_bit_weights_give_the_answers_of_what_they_are_widened_to(folder, capsys):
    pytest.importorskip("transformers.core_model_loading", reason="transformers 5 alone is seen to")
    packed, plain = folder / "packed", folder / "plain"
    quantised.bitsandbytes_llama(packed, "nf4 nested", plain)
    answers = []
    for path in (packed, plain):
        tokenizer().save_pretrained(path)
        (folder / "answers.jsonl").unlink(missing_ok=True)
        code, said = run(
            path, [json.dumps({"prompt": "the cat sat"})], "--host-memory", "4MiB", folder=folder
        )
        assert code == 0, capsys.readouterr().err
        answers.append(said)
    assert answers[0] == answers[1]


def test_a_line_ends_at_a_line_feed_alone(tmp_path):
    said = "the\u2028cat\x85sat\x0con"
    for name, text in (("p.jsonl", json.dumps({"prompt": said}, ensure_ascii=False)), ("p.txt", said)):
        (tmp_path / name).write_text(f"{text}\n\n{text}\r\n", encoding="utf-8", newline="")
        prompts = read_prompts(str(tmp_path / name), tokenizer(), 1, None)
        assert [one.said for one in prompts] == [{"prompt": said}] * 2


def test_a_model_that_is_refused_leaves_no_file_of_answers_behind(base, tmp_path, capsys):
    prompts = [json.dumps({"prompt": "the cat"})]
    assert run(base, prompts, "--host-memory", "4KiB", folder=tmp_path)[0] == 1
    assert "host_memory" in capsys.readouterr().err
    code, answers = run(base, prompts, folder=tmp_path)
    assert (code, len(answers)) == (0, 1)


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
        (['{"prompt": "the"}'], ["--tile", "0"], "at least 1"),
        (['{"prompt": "the"}'], ["--prefill", "0"], "--prefill are at least 1"),
        (['{"prompt": "the"}'], ["--out", "nowhere/a.jsonl"], "there is no folder of that file"),
        (['{"prompt": "the"}'], ["--out", "."], "--out . exists, and is never overwritten"),
    ],
)
def test_bad_input_is_refused_by_name_before_weights_are_read(base, tmp_path, capsys, prompts, options, why):
    code, _ = run(base, prompts, *options, folder=tmp_path)
    assert code == 1
    assert why in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()
