"""What the tests of the kernels share: instruction sets, values of every kind, a split master, scalars."""

import torch

from infinity import kernels

ISAS = ("scalar", "avx2", "avx512")
GRADIENTS = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}


def supported(name):
    before = kernels.isa()
    try:
        kernels.set_isa(name)
    except kernels.UnsupportedIsaError:
        return False
    kernels.set_isa(before)
    return True


def same_under_every_isa(every_operation, n, offset):
    """Check that each instruction set gives what scalar gives: tensors, by the operation's name."""
    results = {}
    for name in filter(supported, ISAS):
        kernels.set_isa(name)
        results[name] = every_operation(n, offset, seed=n)
    for name, result in results.items():
        for operation, expected in results["scalar"].items():
            assert torch.equal(bits(expected), bits(result[operation])), (name, operation)


def same_on_any_threads(every_operation):
    """Check that 1, 2, 3 and 8 threads give the same."""
    results = []
    for threads in (1, 2, 3, 8):
        kernels.set_threads(threads)
        assert threads == kernels.threads()
        results.append(every_operation(16384 * 9 + 5, 0, seed=7))
    for result in results[1:]:
        for operation, expected in results[0].items():
            assert torch.equal(bits(expected), bits(result[operation])), operation


def bits(tensor):
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def f32_of_bits(patterns):
    """Takes unsigned 32-bit patterns."""
    return torch.tensor(patterns, dtype=torch.int64).to(torch.int32).view(torch.float32)


def random_bits(n, seed, dtype=torch.float32):
    """Draw every kind of value: normal ones, denormals, infinities, NaNs of any payload and sign."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bfloat16:
        return torch.randint(-(2**15), 2**15, (n,), generator=generator).to(torch.int16).view(dtype)
    drawn = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32).view(dtype)
    special = f32_of_bits(
        [0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F812345, 0x7F7FFFFF, 0x7F700001]
    )
    places = torch.randint(0, 8, (n,), generator=generator) == 0
    return torch.where(places, special[torch.randint(0, len(special), (n,), generator=generator)], drawn)


def addresses(*tensors):
    return [tensor.data_ptr() for tensor in tensors]


def shifted(tensor, offset):
    """Return a copy that starts `offset` elements into its storage."""
    storage = torch.empty(len(tensor) + offset, dtype=tensor.dtype)
    storage[offset:] = tensor
    return storage[offset:]


def split(master):
    hi, lo = (torch.empty(len(master), dtype=torch.int16) for _ in range(2))
    kernels.split(len(master), *addresses(master, hi, lo))
    return hi, lo


def join(hi, lo):
    master = torch.empty(len(hi))
    kernels.join(len(hi), *addresses(hi, lo, master))
    return master


def scalars(**changes):
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    return kernels.AdamWScalars(**(settings | changes))


def scalars_of(recipe, group, step, clip=1.0):
    """Turn a param group, as torch.optim names its options, into the scalars of a kernel."""
    group = dict(group)
    if "betas" in group:
        group["beta1"], group["beta2"] = group.pop("betas")
    if recipe == "lion":
        return kernels.LionScalars(**group, clip=clip)
    kind = {"sgd": kernels.SGDScalars, "adagrad": kernels.AdagradScalars}.get(recipe, kernels.AdamWScalars)
    return kind(**group, step=step, clip=clip)


def small_adamw(state):
    """Return AdamW's step on small moments, which takes addresses one after the other, as kernels.adamw."""
    names = ("hi", "lo", *kernels.fields_of_moments("adamw", state))

    def step(n, *given):
        at = dict(zip(names, given, strict=False))
        kernels.small_step("adamw", "bf16", state, n, at, *given[len(names) :])

    return step
