"""How batches are cut into microbatches and outputs are merged: the functions of torch.distributed.pipelining.microbatch."""
from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks

__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks"]
