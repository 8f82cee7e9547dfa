import torch
from torch.utils.data import *
import ignite_dist as idist
class It(IterableDataset):
    def __iter__(s):
        w=get_worker_info(); return iter(range(w.id,24,w.num_workers) if w else range(24))
L=lambda l:[b.tolist() for b in l]
l=idist.auto_dataloader(It(),batch_size=4,num_workers=2,shard=True); print("self-splitting shard",L(l))
class P(IterableDataset):
    def __iter__(s): return iter(range(24))
l=idist.auto_dataloader(P(), shard=True, batch_size=4, num_workers=2, persistent_workers=True)
it=iter(l); [next(it) for _ in range(3)]; idist.save_checkpoint("/tmp/review/k.pt",loader=l); list(it)
idist.load_checkpoint("/tmp/review/k.pt",loader=l); print("persist", L(l))
