"""The first weights of experts that learn only later which experts they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...experts import Experts


@dataclass
class InitialWeights:
    """How the experts were initialised, until the groups exist that say which experts these are.

    The constructor can only guess the rank's place in its expert-parallel group: process groups may not exist yet,
    and the layout is in a config not read yet.
    """

    template: nn.Module
    initialize: Callable[[nn.Module, int], None]
    first_id: int
    random_state: Tensor

    @staticmethod
    def of(expert: nn.Module, initialize: Callable[[nn.Module, int], None], first_id: int) -> InitialWeights:
        return InitialWeights(copy.deepcopy(expert), initialize, first_id, torch.get_rng_state())

    def _experts(self, first_id: int, like: Experts) -> list[Tensor]:
        """The first weights of the experts from ``first_id`` on, in the dtype and place of ``like``."""
        # Drawn in the constructor's dtype and place: a generator draws other numbers in bfloat16 or on a device.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_state)
            number = len(like.modules_in_order())
            fresh = Experts(self.template, number, first_id=first_id, initialize=self.initialize)
        pairs = zip(fresh.parameters(), like.parameters(), strict=True)
        return [value.detach().to(parameter) for value, parameter in pairs]

    @torch.no_grad()
    def move(self, experts: Experts, first_id: int) -> None:
        """Gives ``experts`` the weights of the experts from ``first_id`` on, if those of others were given.

        Weights written since (a checkpoint, the model's own initialisation) stand.
        """
        if first_id == self.first_id:
            return
        given = self._experts(self.first_id, experts)
        if all(torch.equal(value, parameter) for value, parameter in zip(given, experts.parameters(), strict=True)):
            for parameter, value in zip(experts.parameters(), self._experts(first_id, experts), strict=True):
                parameter.copy_(value)
