"""The jobs that read data, train and score models, each in processes of its own. Nothing here imports Dagster or MLflow.

    main                                     the entry point of every job
    loop, sft                                jobs that train: the policy, and the reference model where a recipe asks for it
    reference, evaluate, rescore, merge      jobs that score or write models; jobs on data are in data/
    trainer, stepper, objective, agreement   the training loop, one step of it, what is minimized, what ranks exchange
    run_record                               what a run remembers of its steps, and where it resumes
    optim, distributed_muon                  the optimizer; Muon over several processes
    trained_model                            loading a model for training and writing what was trained
    checkpoint, saver, pieces                checkpoints: their files, saving in a thread, their format
    scored_pairs, proof, tails, memoized     log-probs without gradients: of pairs, compared with the table, from the memo
    accuracy                                 how certain the share of pairs ranked rightly is
    generate, report, provenance             samples, the evaluation's page, what a job ran on
    distributed                              the processes of a job

    data/        from files to tokenized pairs, and from those to micro-batches
    model/       from sequences to log-probs: rows, attention, head, adapters, routing of experts
    losses/      from log-probs to losses
    parallel/    weights and gradients on one process or many
    launch/      starting, following and ending processes; without torch
    contract/    settings, identities and file formats that all others share; without torch

docs/architecture.md says where to begin reading.
"""
