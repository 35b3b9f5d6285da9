"""How far 16-bit weights have moved, in a byte each."""

from infinity.kernels.library import library
from infinity.kernels.operations import as_u8, as_u16, check


def encode_moves(n: int, before: int, behind: int, most: int, codes: int) -> int:
    """Write to `codes` how far n 16-bit weights have moved, in steps of their type, a byte each, and behind
    these the weights that have moved by more than 127: [Note: moves]. Return the bytes; 0 where these are
    more than `most`.
    """
    check(n, before=before, behind=behind, codes=codes)
    return int(library.infinity_encode_moves(n, as_u16(before), as_u16(behind), most, as_u8(codes)))


def move(n: int, codes: int, weights: int) -> None:
    """Move n 16-bit weights, which are as before, by what `encode_moves` has written."""
    check(n, codes=codes, weights=weights)
    library.infinity_move(n, as_u8(codes), as_u16(weights))
