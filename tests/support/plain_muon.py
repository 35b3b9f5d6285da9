"""Muon and AdamW in memory, in plain steps, for the tests of infinity.Muon."""

import torch

from infinity import reference
from infinity.reference import recipe
from infinity.reference.steps import muon_step

MUON = {"lr": 2e-2, "weight_decay": 0.1}
ADAMW = {"lr": 1e-2, "weight_decay": 0.2}
KNOBS = {"momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.7750, 2.0315)}
KNOBS |= {"eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None}
BETAS = {"betas": (0.9, 0.999), "eps": 1e-8}


class PlainMuon:
    """Muon and AdamW in memory, on a prepared model. muons: names of the parameters that are Muon's."""

    def __init__(self, model, muons, muon=MUON, adamw=ADAMW, clip=None):
        self.model, self.muons, self.clip = model, muons, clip
        self.muon, self.adamw = {**KNOBS, **muon}, {**BETAS, **adamw}
        self.count = dict.fromkeys((name for name, _ in model.named_parameters()), 0)
        self.masters = {
            name: recipe._adopt(one, one.dtype) if one.requires_grad else one
            for name, one in model.named_parameters()
        }
        self.state = {
            name: (torch.zeros_like(one), torch.zeros_like(one)) for name, one in self.masters.items()
        }

    @torch.no_grad()
    def step(self):
        total = 0.0
        factor = torch.ones(())
        given = {n: one for n, one in self.model.named_parameters() if one.grad is not None}
        if self.clip is not None:
            total = sum(recipe.sum_squares(recipe._stored(one)[0]) for one in given.values())
            norm = torch.tensor(total, dtype=torch.float64).sqrt().float()
            factor = torch.clamp(torch.tensor(self.clip) / (norm + 1e-6), max=1.0)
        for name, one in given.items():
            grad, scale = recipe._stored(one)
            m, v = self.state[name]
            self.count[name] += 1
            master = self.masters[name]
            recipe._take_edits(one, master)
            if name in self.muons:
                muon_step(master, m, grad, scale * factor, self.muon)
            else:
                reference.adamw_step(master, m, v, grad, scale * factor, self.count[name], self.adamw)
            one.copy_(reference.rounded(master, one.dtype))

    def zero_grad(self):
        for one in self.model.parameters():
            one.grad = None
