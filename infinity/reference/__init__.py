"""The recipe in memory, in plain PyTorch, that everything is compared with."""

from infinity.reference.recipe import ReferenceAdamW as ReferenceAdamW
from infinity.reference.recipe import adamw_small_step as adamw_small_step
from infinity.reference.recipe import adamw_step as adamw_step
from infinity.reference.recipe import canonical_ as canonical_
from infinity.reference.recipe import clip_grad_norm_ as clip_grad_norm_
from infinity.reference.recipe import fused as fused
from infinity.reference.recipe import prepare as prepare
from infinity.reference.recipe import rounded as rounded
