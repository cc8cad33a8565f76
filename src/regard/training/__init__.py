"""Train what the declarations describe: data, batches, the loss, the loop, checkpoints, recipes."""
