"""Ranks are forked from a process that has imported Transformers and FSDP, too."""

import ranks

ranks.PRELOADED += ["torch.distributed.fsdp", "neuronmm_ops.hf", "tiny"]
