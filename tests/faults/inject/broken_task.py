"""Pretraining task that fails as BERT_DP_TEST_FAULT defines; see sitecustomize.py."""

from sitecustomize import COUNTER, break_now

from tests.wrapped_task import WrappedTask


class BrokenTask(WrappedTask):
    _hit = False

    def num_targets(self, first_sample, count):
        self._hit = False
        targets = super().num_targets(first_sample, count)
        COUNTER.step = self.step
        return targets

    def loss(self, model, batch):
        what, place = COUNTER.fault["what"], "compile" if self.step < 0 else "step"
        if COUNTER.due(place) or self._hit:  # in every micro batch of the step
            self._hit = what in ("nan", "spike")
            if not self._hit:
                break_now(COUNTER.fault)
        loss = self.inner.loss(model, batch)
        return loss * (float("nan") if what == "nan" else 10.0) if self._hit else loss

    def evaluate(self, model, context):
        if self.step >= 0 and COUNTER.due("eval"):
            break_now(COUNTER.fault)
        return self.inner.evaluate(model, context)

    def stream(self, **where):
        return BrokenStream(self, self.inner.stream(**where))


class BrokenStream:
    def __init__(self, task, inner):
        self._task, self._inner = task, inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def next(self):
        if COUNTER.due("data", self._task.step):
            break_now(COUNTER.fault)
        return self._inner.next()


make_task = BrokenTask
