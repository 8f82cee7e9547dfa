import sys, warnings
warnings.simplefilter("ignore")
import numpy as np, torch
from torch.utils.data import *
import ignite_dist as idist
L=lambda l:[b.tolist() if hasattr(b,"tolist") else b for b in l]
def fn(rank):
    out={}
    def t(name,f):
        try: out[name]=f()
        except BaseException as e: out[name]="!! %s %s"%(type(e).__name__,str(e)[:260])
    frame=np.array([[i,"item %d"%i] for i in range(9)],dtype=object)
    t("object array", lambda: len(list(idist.auto_dataloader(frame,batch_size=4,collate_fn=list))))
    t("nothing given", lambda: L(idist.auto_dataloader(list(range(6)))))
    t("bs None + BatchSampler", lambda: L(idist.auto_dataloader(np.arange(16),sampler=BatchSampler(SequentialSampler(range(16)),4,False),batch_size=None)))
    ds=list(range(16))
    t("taken DistributedSampler", lambda: (len(DataLoader(ds,batch_size=4,sampler=DistributedSampler(ds,2,rank))), len(idist.auto_dataloader(DataLoader(ds,batch_size=4,sampler=DistributedSampler(ds,2,rank))))))
    def other_world():
        l=idist.auto_dataloader(ds,batch_sampler=BatchSampler(DistributedSampler(ds,2,rank,shuffle=False),2,False)); it=iter(l); next(it);next(it); p=l.position(); return {k:p[k] for k in ("epoch","batches","samples")}
    t("of rank bs position", other_world)
    def setep():
        l=idist.auto_dataloader(ds,shuffle=True,seed=0,batch_size=4); it=iter(l); l.set_epoch(1); a=L(it); l.set_epoch(0); return a==L(l), l.position()["epoch"]
    t("set_epoch between iter and next: draws epoch 0", setep)
    class EpS(Sampler):
        epoch=0
        def __iter__(s): return iter(torch.randperm(8, generator=torch.Generator().manual_seed(s.epoch)).tolist())
        def __len__(s): return 8
        def set_epoch(s, e): s.epoch=e
    def inner_resume():
        l=idist.auto_dataloader(ds,sampler=EpS(),batch_size=4); l.set_epoch(2); it=iter(l); next(it); p=l.position(); rest=L(it)
        m=idist.auto_dataloader(ds,sampler=EpS(),batch_size=4); m.resume(p,True); return rest, L(m)
    t("inner sampler's epoch after resume", inner_resume)
    def group():
        l=idist.auto_dataloader(ds,shuffle=True,batch_size=4,group=[0,1]); return L(l)[0]
    t("group", group)
    def mixed():
        return idist.auto_dataloader(ds,sampler=DistributedSampler(ds,2,0),batch_size=4) and "ok"
    for r in range(2):
        idist.barrier()
        if r==rank: print(rank, *("\n   %s: %s"%kv for kv in out.items()), flush=True)
    idist.barrier()
    try: print(rank, mixed(), flush=True)
    except BaseException as e: print(rank,"mixed !!",type(e).__name__,str(e)[:200],flush=True)
if __name__=="__main__": idist.spawn("gloo",fn,nproc_per_node=2)
