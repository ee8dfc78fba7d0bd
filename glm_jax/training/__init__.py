"""Training: forward passes to differentiate, optimiser, loop, checkpoints.

config           TrainConfig and its stages
windows          who sees whom in packed windows; the selection
attention        gathered, masked or fused, all equal
forward          the trunk; index groups are rematerialised
draft_forward    the drafter's repeated steps, shared or not
parameters       a model as a dict of float32 arrays
optimizer        Muon and AdamW, the learning rate
step             losses, gradients, update, router bias
checkpointing    saved in the background, verified when read
metrics, loop    JSON lines; the run
"""
