"""Ready-made hooks: thin callables of an Event, for `Manager(hooks=[...])`.

log(...)            records of the standard library's logging
jsonl(path)         one line of JSON an event, appended to a file; `read_jsonl` reads it
webhook(url)        an HTTP POST an event, delivered in the background
command(argv)       a process an event, in the background
prometheus(...)     counters, gauges and histograms (extra `prometheus`)
opentelemetry(...)  spans of saves and restores (extra `opentelemetry`)
tensorboard(...)    scalars (extra `tensorboard`, or any writer that has `add_scalar`)
mlflow(...)         pointer, metrics and lineage at a run (extra `mlflow`); `mlflow_checkpoint` finds it

A *hook* is called in the thread where the event happens; those that talk to somebody far away only
queue there. One that raises is logged by the manager and costs nothing.
"""

from ckptfmt.manager.hooks.delivery import command, webhook
from ckptfmt.manager.hooks.lines import jsonl, read_jsonl
from ckptfmt.manager.hooks.logs import log
from ckptfmt.manager.hooks.metrics import prometheus
from ckptfmt.manager.hooks.plain import as_plain
from ckptfmt.manager.hooks.scalars import tensorboard
from ckptfmt.manager.hooks.spans import opentelemetry
from ckptfmt.manager.hooks.tracking import mlflow, mlflow_checkpoint

__all__ = [
    "as_plain",
    "command",
    "jsonl",
    "log",
    "mlflow",
    "mlflow_checkpoint",
    "opentelemetry",
    "prometheus",
    "read_jsonl",
    "tensorboard",
    "webhook",
]
