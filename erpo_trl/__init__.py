"""ERPO (arXiv 2608.23311) for Hugging Face TRL: regularization on the input side of policy optimization."""

from importlib import import_module


__version__ = "0.1.0"

_MODULES = {
    "config": ["ERPOConfig", "ERPORLOOConfig", "QueryRegularizationConfig"],
    "scoring": ["score_queries"],
    "trainer": ["ERPORLOOTrainer", "ERPOTrainer", "QueryRegularizationMixin"],
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(import_module(f".{_HOME[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])
