"""Starting, following and ending the processes of a job. Nothing here imports torch."""
