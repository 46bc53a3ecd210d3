"""The jobs that read data, train and score models, each in its own processes. Nothing here imports Dagster or MLflow.

Each line imports only from the lines below it.

* `main`: the entry point of every job.
* `jobs/`: what each kind of job does, a file a kind.
* `evaluation/`: sampled answers, and the HTML report.
* `loop/`: the training loop, one optimizer step, what is minimized.
* `scoring/`: log-probs without gradients, and checks of them.
* `losses/`: from log-probs to losses.
* `parallel/`: weights and gradients on one process or many.
* `checkpoint/`: checkpoints: their files, and saving in a thread.
* `optim/`: the optimizer; Muon over several processes.
* `data/`: from files to tokenized pairs, and from these to micro-batches.
* `model/`: from sequences to log-probs: attention, head, adapters, routing of experts.
* `launch/`: starts, follows and ends processes; without torch.
* `provenance`: the machine and the software of a job.
* `distributed`: the processes of a job.
* `contract/`: settings, identities and file formats that all others share; without torch.

docs/contributing/architecture.md names the files to read first.
"""
