"""Work of a bench's job that one process cannot do."""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from scalewise.errors import RecipeError


@dataclass(frozen=True)
class Failing:
    @contextmanager
    def opened(self, team):
        def perform(request):
            if request == "fail" and team.rank == 1:
                raise RecipeError("planted must not be, got it; take it away")
            if request == "exit" and team.rank == 1:
                os._exit(7)
            return team.rank, torch.get_num_threads()

        yield perform
