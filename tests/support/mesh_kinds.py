"""Small models of transformers that are divided by their own plans, on a mesh. Used by mesh_run.py."""

from pathlib import Path

import torch
import torch.distributed as dist

import infinity

VOCABULARY, WIDTH = 61, 64
KINDS = ("Llama", "Qwen3", "Mistral", "Qwen2", "Gemma", "Mixtral")


def of_kind(kind):
    """Return the class of a model of transformers, and its configuration."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=kind == "Gemma",
        pad_token_id=0,
        **({"num_local_experts": 4} if kind == "Mixtral" else {}),
    )
    return getattr(transformers, f"{kind}ForCausalLM"), config


def by_plan(place, kind):
    """Build a model of transformers, and divide it by its own plan."""
    model, config = of_kind(kind)
    torch.manual_seed(3)
    return infinity.huggingface.tensor_parallel(model(config), place.tensor)


def from_transformers(place, kind):
    """Load a model of transformers that is divided by its own plan, from files that rank 0 writes."""
    from transformers.distributed import DistributedConfig

    model, config = of_kind(kind)
    folder = f"{place.folder}/{kind}"
    if dist.get_rank() == 0 and not Path(folder).exists():
        torch.manual_seed(3)
        model(config).save_pretrained(folder)
    dist.barrier()
    plan = DistributedConfig(tp_size=place.tensor.size(), tp_plan="auto")
    return model.from_pretrained(folder, distributed_config=plan, dtype=torch.float32)


def generated(place):
    """Generate, the prompt in chunks and keys and values in a static cache; return whether tokens are those
    of a cache that grows, and of the model in memory.
    """
    plain = by_plan(place, "Llama").eval()
    with infinity.Init(mesh=place.mesh, data="dp", dtype="fp32", nvme=place.folder, host_memory="16MiB"):
        model = by_plan(place, "Llama")
    ids = torch.arange(1, 23).reshape(2, 11)
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    expected = plain.generate(ids, **options)
    model.eval()
    in_chunks = {"cache_implementation": "static", "prefill_chunk_size": 5}
    return {
        "grows": torch.equal(model.generate(ids, **options), expected),
        "static": torch.equal(model.generate(ids, **in_chunks, **options), expected),
    }
