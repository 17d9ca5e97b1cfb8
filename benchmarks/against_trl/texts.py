"""Texts of the page that do not depend on what was measured."""

INTRODUCTION = """\
# Next to TRL

The same GRPO by this package and by TRL's `GRPOTrainer`: one update's loss and gradient, whole runs, samples a second.
Model and task are those of the quickstart: 0.3M parameters that sort five digits, about half of the time before RL.
[benchmarks/README.md](../../benchmarks/README.md) says how to install and run it.
"""
LOSSES = """\
TRL samples and scores completions; both sides get {rows} of them ({tokens} response tokens, cut at random lengths), the
same advantages, old log-probs and reference log-probs (the model's, with noise of 0.3, so that ratios are clipped), and
compute the gradient in float32 before any clipping of its norm: TRL by `GRPOTrainer.compute_loss`, this package by
`Trainer.update`, whose first Adam moment is the gradient when `betas[0]` is 0. *loss apart* is |difference| / |loss|,
*gradient apart* the norm of the difference over the norm; *equal* means at most 1e-6 and 1e-5.
"""
CURVES = """\
Thin lines are seeds, thick ones their mean. The two draw their samples by other random numbers, so lines of one seed
need not run together; the blue and the orange bundle should, and the green one, whose old log-probs are those that the
engine gave when it sampled. The gray one is this package as it draws mini-batches by default.
"""
ALIKE = """\
**Alike**: the model folder; prompts in the same order; 32 prompts a step with 8 samples each, at temperature 1 and at
most 12 tokens, by a model of transformers (TRL's by `generate`, ours in a loop of the engine's own); advantages of
groups; 4 optimiser steps a step in float32; loss `grpo` (a mean over rows of means over tokens) with clip 0.2 and no
KL; AdamW without weight decay, learning rate 1e-4 after a rise over 5 optimiser steps (TRL is given this schedule: its
own begins at 0), gradients clipped at norm 1; one torch thread. Here: one worker for all roles, engine `transformers`,
backend `torch`. TRL: one process, without gradient checkpointing and bfloat16, which are its defaults. Accuracy is that
of greedy answers to 256 other prompts, by the same engine.
"""
NOT_ALIKE = """\
**Mini-batches**: TRL shuffles a step's rows and cuts them into mini-batches; so does `algorithm.split_groups=true`, in
the blue runs. By default a prompt's samples stay together: a mini-batch then has a quarter of the step's prompts
instead of nearly all, and on this task the policy sharpens somewhat more slowly.

**Not alike**: TRL adds 1e-4 to the standard deviation of a group's rewards, this package 1e-6; TRL pads, this package
packs, and computes a prompt once for those of its samples that lie side by side.

**Old log-probs**: both pass through the policy for them. *ours, engine's log-probs* takes those of the tokens as the
engine drew them (`algorithm.old_logprobs=siirl_dask.nodes:rollout_logprobs`), which differ by rounding alone; TRL's
`generate` tells none.
"""
SPEED = """\
The two take turns, a fresh process each, in reversed order every other round; on the same one or two cores, to which
everything that a side starts is pinned: here the scheduler, the nanny and the client as well. TRL's process has a torch
thread a core, each of our workers has one. A step is all of it:
prompts, generation, rewards, old log-probs, four updates, new weights, and here also every sample written to disk. The
start and the first two steps are not counted. Settings are those of the runs above, the blue ones and the green ones.
"""
