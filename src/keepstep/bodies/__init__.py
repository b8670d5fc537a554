"""The far end of executors: processes in which bodies of steps run that a worker has sent there."""
