"""What the trainer calls before, between and after its steps."""

from training.contract.protocol.input_files import check_inputs_unchanged


class Callback:
    """The trainer calls each callback on every rank, in the order of its list.

    A callback answers no signal and may take long, so the trainer saves a due checkpoint first. After resuming, the trainer
    calls `on_train_begin` with the step of the checkpoint. It then repeats the work that was due after that step.
    """

    def on_train_begin(self, step: int) -> None:
        """Act before the first step that is taken. `step` is the step resumed from, 0 at the start of a run."""

    def on_step_end(self, step: int) -> None:
        """Act after `step`, its event and its checkpoint."""


class CheckInputs(Callback):
    """Stop the run if an input file has changed: pairs stay mapped, and training must not go on with others."""

    def on_train_begin(self, step: int) -> None:
        check_inputs_unchanged()

    def on_step_end(self, step: int) -> None:
        check_inputs_unchanged()
