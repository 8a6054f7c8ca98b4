"""Pipeline parallelism: one model in stages on several processes.

```python
cut = cut_model(model, sample, stages=4)
pipe = PipelineRunner(cut, axis, loss_fn, schedule="1f1b", num_microbatches=8)
optimizer = torch.optim.SGD(pipe.module.parameters(), 0.1)
loss = pipe.run(x, y)
optimizer.step()
```
"""

from hocket.split.pipeline.cut import BATCH_STATISTICS, Cut, cut_model
from hocket.split.pipeline.runner import PipelineRunner
from hocket.split.pipeline.schedules import SCHEDULES, Action, Schedule, make
from hocket.split.pipeline.timeline import Costs, Span, Timeline, bubble, simulate

__all__ = [
    "Action",
    "BATCH_STATISTICS",
    "Costs",
    "Cut",
    "PipelineRunner",
    "SCHEDULES",
    "Schedule",
    "Span",
    "Timeline",
    "bubble",
    "cut_model",
    "make",
    "simulate",
]
