"""`named(optimizer, *modules)`: names for an optimizer whose modules are not in the tree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer

from ckptfmt.engine import Captured, api
from ckptfmt.errors import UsageError
from ckptfmt.torch import optimizers
from ckptfmt.torch.optimizer_target import OptimizerTarget
from ckptfmt.torch.param_names import parameter_names


class NamedOptimizer:
    """An optimizer together with the modules whose parameters it steps.

    It stands for the optimizer in a tree; its `state_dict` is DCP's form, by parameter name.
    """

    def __init__(self, optimizer: Any, modules: tuple[Any, ...]) -> None:
        self.optimizer = optimizer
        self._modules = [("", modules[0])]
        if len(modules) > 1:
            self._modules = [(str(i), module) for i, module in enumerate(modules)]

    def capture(self, name: str) -> Captured:
        return optimizers.capture(self.optimizer, name, self._modules, in_tree=False)

    def target(self, name: str) -> OptimizerTarget:
        return OptimizerTarget(self.optimizer, name, self._modules)

    def state_dict(self) -> Any:
        """State and groups by parameter name, as `Optimizer.load_state_dict` takes it too."""
        return self.capture("").tree

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a state by parameter name; what differs is raised before anything is touched.

        Raises:
            MismatchError: Another optimizer, or other parameters.
        """
        api.restore(self, state)


def named(optimizer: Optimizer, *modules: Module) -> NamedOptimizer:
    """Name an optimizer's parameters by modules that are not in the tree beside it.

    With several modules a name begins with the module's position: `1.weight`.

    Raises:
        UsageError: A parameter is in none of the modules, or there are none.
    """
    made = NamedOptimizer(optimizer, modules) if modules else None
    if (
        made is None
        or parameter_names(optimizer, "", made._modules, warn=False).named_by != "module"
    ):
        raise UsageError(
            "the optimizer's parameters are in none of the modules",
            reason="torch-optimizer-parameters",
            where="named(optimizer, *modules)",
            found=f"{len(modules)} modules",
            do="pass the modules whose parameters it was built from",
        )
    return made
