import gc,time,multiprocessing as mp, torch
from torch.utils.data import *
import ignite_dist as idist
gc.disable()
l=idist.auto_dataloader(list(range(24)), batch_size=4, num_workers=2, persistent_workers=True); list(l); del l; time.sleep(.5); print(len(mp.active_children()))
gc.collect(); time.sleep(.5); print("after gc",len(mp.active_children()))
class It(IterableDataset):
    def __iter__(s):
        w=get_worker_info(); return iter(range(w.id,24,w.num_workers) if w else range(24))
L=lambda l:[b.tolist() for b in l]
mk=lambda: idist.auto_dataloader(It(),batch_size=4,num_workers=2)
l=mk(); it=iter(l); [next(it) for _ in range(3)]; p=l.position(); r=L(it); m=mk(); m.resume(p,True); print(r,L(m))
l=idist.auto_dataloader(It(),batch_size=4,num_workers=2,shard=True); print("self-splitting shard",L(l))
