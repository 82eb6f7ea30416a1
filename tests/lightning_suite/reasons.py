"""Why a test of Lightning's may fail under MegatronStrategy although nothing is wrong, one class a reason.

A pattern is kept as narrow as what it defends: a failure that no reason knows is a defect until somebody has looked.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A class of failures, by patterns of their message and of the test's name that must both be found."""

    name: str
    defence: str
    """Why such a failure is no defect, in a sentence."""
    message: str
    test: str = ""
    modes: tuple[str, ...] = ("world1", "lockstep", "ddp")
    rank: int = 0
    """The first rank that fails, where both run the test: 1 is a test that rank 0 passes."""

    def covers(self, mode: str, test: str, message: str, rank: int) -> bool:
        """Whether the failure is of this class."""
        is_found = bool(re.search(self.message, message) and re.search(self.test, test))
        return is_found and mode in self.modes and rank >= self.rank


REASONS = (
    Reason(
        name="the class's name",
        defence="The test asks whether the strategy, its launcher or its precision plugin is of Lightning's class.",
        message=r"assert 0\s+\+\s+where 0 = sum\(<generator object test_pytorch_profiler_trainer_fit"
        r"|isinstance\(<lightning_megatron\.trainer\.(strategy|precision|setup\.launcher)\.\S+ object"
        r"|isinstance\(<tests\.lightning_suite\.strategies\.\S+ object",
    ),
    Reason(
        name="a mock of an internal",
        defence="The test puts a mock in place of a method of Lightning's base class, which ours overrides, of "
        "an object that a run needs, or of a callback, and asks how the mock was called.",
        message=r"MagicMock name='backward'|Mock object has no attribute|call\.__eq__|type object 'Mock'|"
        r"Expected 'on_exception' to be called once|torch\.save\.call_count|"
        r"'function' object has no attribute 'call_count'|Expected 'clip_grad_norm_' to have been called|"
        r"property 'world_size' of .* has no setter",
    ),
    Reason(
        name="a checkpoint that is not there",
        defence="The test names a path at which there is no checkpoint, and mocks the loading or asks for Lightning's "
        "error. A run looks before it starts, and its ConfigurationError names the path.",
        message=r"this configuration cannot run",
        test=r"test_checkpoint_path_input|test_hpc_restore_attempt|test_try_resume_from_non_existing_checkpoint",
    ),
    Reason(
        name="further keys of a checkpoint",
        defence="The test compares a whole checkpoint, or the state of a loop, with the keys that Lightning writes; "
        "ours adds state by which a run resumes within an epoch and on other layouts.",
        message=r"\[\{'name': 'co\.\.\.|\[\{'name': 'on\.\.\.|combined_loader",
        test=r"test_trainer_model_hook_system_fit|test_load_from_checkpoint_hook_calls|test_trainer_reset_correctly|"
        r"test_loop_state_on_exception",
    ),
    Reason(
        name="a callback of the strategy's own",
        defence="The test counts the Trainer's callbacks within a run, among which is the strategy's own.",
        message=r"assert 4 == 5",
        test=r"test_callbacks_state_fit_ckpt_path",
    ),
    Reason(
        name="resuming within an epoch",
        defence="The test asks for Lightning's warning that a run resumed within an epoch may repeat data; "
        "here it goes on with the next batch.",
        message=r"did not match any of the \d+ warnings|DID NOT WARN",
        test=r"test_restarting_mid_epoch_raises_warning|test_resume_mid_epoch_warning",
    ),
    Reason(
        name="a step after its run",
        defence="The test calls an internal loop of Lightning's after fit has returned. Gradients are summed, and "
        "optimizers stepped, within a run; the error says so.",
        message=r"RuntimeError: no run is under way",
        test=r"__flow|_flow_scalar|test_training_step_no_return_when_even",
    ),
    Reason(
        name="the lock of a live run",
        defence="The test lists the folder of checkpoints while the run goes on, or after its processes were killed. "
        "It holds the lock by which a second run is refused; it goes when the run ends, and without one it locks "
        "nothing.",
        message=r"'\.run\.lock', 'model\.ckpt'\] == \['model\.ckpt'\]|len\(\['\.run\.lock', '[^']*\.ckpt'\]\)"
        r"|assert \{'\.run\.lock',",
        test=r"test_none_monitor_not_alternating|test_mlflow_log_dir|test_swa_resume_training_from_checkpoint_ddp|test_ema_resume_ddp",
    ),
    Reason(
        name="a compiled LightningModule",
        defence="Lightning lets a compiled LightningModule run under strategies of its own classes alone.",
        message=r"Using a compiled model is incompatible with the current strategy",
    ),
    Reason(
        name="os.rename made to fail",
        defence="The test makes os.rename fail as between two devices; ours renames within one folder.",
        message=r"Invalid cross-device link",
        test=r"test_local_cross_device_checkpoint",
    ),
    Reason(
        name="a stand-in for the training loader",
        defence="The test asks for the training loader itself. `trainer.train_dataloader` is a stand-in with its "
        "attributes, which knows its position: a resumed run goes on from there.",
        message=r"PositionedIterable object|assert <lightning_me\S+ == <torch\.utils",
        test=r"test_request_dataloader|test_train_dataloader_passed_to_fit",
    ),
    Reason(
        name="a precision that is refused",
        defence="16-true, and Transformer Engine with float16 weights, are refused, naming what is supported.",
        message=r"(HalfPrecision|TransformerEnginePrecision)\S*( replace_layers=None\))? ?\)? is not supported by Mega",
    ),
    Reason(
        name="a mock of Transformer Engine",
        defence="The test puts a mock in place of Transformer Engine, and our FP8 layers read its recipe.",
        message=r"FP8 recipe Mock",
    ),
    Reason(
        name="how a mock of the checkpoint plugin is called",
        defence="The plugin gets what it is to get; the test compares a Path with the str of it.",
        message=r"expected call not found",
        test=r"test_trainer_save_checkpoint_storage_options",
    ),
    Reason(
        name="the closure runs before the optimizer's step",
        defence="The test asks that `step` of the optimizer is entered before training_step. Gradients are reduced, "
        "clipped and unscaled between the two, so the closure comes first, as under Lightning's own mixed precision.",
        message=r"assert \['training_st.* == \['step', 'tra|DID NOT RAISE MisconfigurationException",
        test=r"test_train_loop_system|test_optimizer_step_no_closure_raises",
    ),
)

IN_PLACE_OF_DDP = (
    Reason(
        name="DDP itself",
        defence="The test asks how DDPStrategy wraps a module, or for one of its private attributes.",
        message=r"has no attribute '(_ddp_kwargs|_get_process_group_backend|_collect_rank_zero_results)'"
        r"|DistributedDataParallel\)",
        modes=("ddp",),
    ),
    Reason(
        name="one process needs no group",
        defence="The test starts one process and asks torch.distributed for its group. DDP makes one of one process; "
        "here, as under Lightning's SingleDeviceStrategy, one process has none.",
        message=r"Default process group has not been initialized",
        test=r"batch_sampler_set_epoch_called\[False\]",
        modes=("ddp",),
    ),
    Reason(
        name="gradients that are no numbers",
        defence="The test makes the loss Inf or NaN and looks at it after the step. The run ends before such a step, "
        'naming the parameter; OptimizerConfig(on_nonfinite="ignore") lets it through.',
        message=r"NaN or Inf in gradients at step",
        test=r"test_trainer_spike_detection_integration",
        modes=("ddp",),
    ),
    Reason(
        name="loaders are cut without a DistributedSampler",
        defence="The test asks for a DistributedSampler in the loader, or for the warning that its evaluation counts "
        "samples twice. Here ranks take their rows of each global batch from the loader's own sampler, and an "
        "evaluation counts each sample once.",
        message=r"isinstance\(<torch\.utils\.data\.sampler\.\S+ object[^\n]*, DistributedSampler\)|PossibleUserWarning"
        r"|'_IndexBatchSamplerWrapper' object has no attribute 'sampler'",
        test=r"test_replace_distributed_sampler|test_trainer_predict_ddp_spawn|test_eval_distributed_sampler_warning|batch_sampler_set_epoch_called",
        modes=("ddp",),
    ),
)

IN_LOCKSTEP = (
    Reason(
        name="rank 1 is silent",
        defence="Rank 0 passes. Rank 1 looks for a warning, a line of the log or a progress bar, which Lightning shows "
        "on rank 0 alone.",
        message=r"DID NOT WARN|did not match any of the \d+ warnings|^AssertionError: assert '[^\n]*' in ''"
        r"|== \[call\(",
        modes=("lockstep",),
        rank=1,
    ),
    Reason(
        name="rank 1 shows no progress",
        defence="Rank 0 passes. Lightning shows progress bars on rank 0 alone.",
        message="",
        test=r"callbacks/progress/",
        modes=("lockstep",),
        rank=1,
    ),
    Reason(
        name="a folder that rank 0 removes",
        defence="Rank 0 passes, and removes the temporary folder that its test made; rank 1, whose checkpoints are "
        "in the same folder, may read the best one afterwards.",
        message=r"FileNotFoundError: .*epoch=0-step=3\.ckpt",
        test=r"test_model_checkpoint_manual_opt$",
        modes=("lockstep",),
        rank=1,
    ),
    Reason(
        name="rank 1 prepares no data",
        defence="Rank 0 passes. Lightning calls `prepare_data` on one rank of a machine.",
        message=r"prepare_data|\[\{'name': 'se\.\.\..* == \[\{'name': 'pr",
        test=r"test_datamodule_hooks_are_profiled|test_trainer_datamodule_hook_system",
        modes=("lockstep",),
        rank=1,
    ),
    Reason(
        name="no batch size is looked for over several processes",
        defence="As Lightning's DDP, the strategy refuses a BatchSizeFinder over several processes: a batch that is "
        "too large ends the run on all of them.",
        message=r"BatchSizeFinder \(Tuner\.scale_batch_size\)|this configuration cannot run",
        test=r"scale_batch_size|batch_size_finder|auto_scale",
        modes=("lockstep",),
    ),
    Reason(
        name="the lock, seen from rank 1",
        defence="Rank 0 passes. Its lock of a run's folder goes when the run ends, and rank 1 lists the folder first.",
        message=r"'\.run\.lock'",
        modes=("lockstep",),
        rank=1,
    ),
    Reason(
        name="the order of a set",
        defence="The test resumes from the files of a set, whose order is another one on each rank.",
        message=r"assert \(41 \+ 0\) == 82|Connection closed by peer",
        test=r"test_fit_ckpt_path_epoch_restored\[True\]",
        modes=("lockstep",),
    ),
    Reason(
        name="a step that takes its batches itself",
        defence="With several processes `training_step(self, dataloader_iter)` is refused before the run: ranks of one "
        "model replica must read the same batch.",
        message=r"this configuration",
        test=r"dataloader_iter|test_fetching_is_profiled|test_prediction_loop_with_iterable_dataset",
        modes=("lockstep",),
    ),
    Reason(
        name="no batch is skipped over several processes",
        defence="The step returns None. Lightning's DDP refuses that as well, in other words.",
        message=r"training_step returned no loss for a batch",
        modes=("lockstep",),
    ),
    Reason(
        name="a mock of the clock",
        defence="The test puts a clock of its own in place of `time.monotonic`, by which ranks wait for one another.",
        message=r"does not reach the failure watch|the process ended in this test",
        test=r"test_time_based_val_check_interval|test_time_and_epoch_gated_val_check",
        modes=("lockstep",),
    ),
    Reason(
        name="throughput of the world",
        defence="ThroughputMonitor adds numbers of the world where there are several processes, and logs on rank 0.",
        message=r"\[call\(metrics|assert \[\] == \[call\(metrics",
        test=r"test_throughput_monitor_eval",
        modes=("lockstep",),
    ),
    Reason(
        name="a logged value is there after the step",
        defence="The test reads Lightning's private results within the step that logs. With several processes values "
        "are reduced once, behind it.",
        message=r"KeyError: 'training_step\.tracking'",
        test=r"test_result_collection_reload",
        modes=("lockstep",),
    ),
    Reason(
        name="a metric that is no attribute",
        defence="Both refuse to log one; the test asks for Lightning's words.",
        message=r"that is not an attribute of the module; make it one",
        test=r"test_logging_raises",
        modes=("lockstep",),
    ),
    Reason(
        name="one file, written by both",
        defence="The test writes a file itself, or mocks torch.save on the rank that would; the other rank reads it.",
        message=r"^EOFError|KeyError: 'hyper_parameters'|UnpicklingError|Should save \d models when",
        test=r"test_current_score|test_model_checkpoint_options|test_default_checkpoint_freq|test_top_k|test_load_past_checkpoint|test_load_from_checkpoint_warn_on_empty",
        modes=("lockstep",),
    ),
    Reason(
        name="nothing by hand before the first run",
        defence="The test saves or loads without a run, by private methods. Several processes are connected when a run "
        "starts: before that it is refused, with these words.",
        message=r"the mesh is made when fit, validate, test or predict starts",
        modes=("lockstep", "ddp"),
    ),
    Reason(
        name="two processes in a notebook",
        defence="The test makes Lightning believe that it runs in a notebook, which can run one process alone.",
        message=r"is not compatible with an interactive environment",
        modes=("lockstep",),
    ),
    Reason(
        name="the module logs its rank",
        defence="The module logs a value with its rank in it, and the test asks for that of the only process.",
        message=r"assert tensor\(3\.\) == \(2 \+ 0\)",
        test=r"test_logging_sync_dist_true\[1-cpu\]",
        modes=("lockstep",),
        rank=1,
    ),
    Reason(
        name="cores for two processes",
        defence="Lightning advises more workers by the cores that a process has; two processes share them.",
        message=r"DID NOT WARN|did not match any of the \d+ warnings",
        test=r"test_warning_with_few_workers",
        modes=("lockstep",),
    ),
)

CONTROL = Reason(
    name="Lightning's DDP fails it too",
    defence="Over the same two processes Lightning's own DDPStrategy fails the test with the same message: it asks for "
    "one process, or rank 1 for what only rank 0 does (warnings, logs, files).",
    message="",
    modes=("lockstep",),
)


def reason_of(mode: str, test: str, message: str, rank: int = 0) -> Reason | None:
    """The first reason that covers a failure, of which `rank` was the first rank; None where there is none."""
    reasons = (*REASONS, *IN_LOCKSTEP, *IN_PLACE_OF_DDP)
    return next((reason for reason in reasons if reason.covers(mode, test, message, rank)), None)
