"""Who makes it happen: engine, worker, runner, and what stands between them and the code of a workflow."""
