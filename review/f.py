import sys, warnings, torch
from torch.utils.data import *
import ignite_dist as idist
L=lambda l:[b.tolist() if hasattr(b,"tolist") else b for b in l]
class It(IterableDataset):
    def __iter__(s): return iter(range(9))
    def __len__(s): return 9
class SL(Sampler):
    def __iter__(s): return iter(range(8))
    def __len__(s): raise NotImplementedError
class Lens(Sampler):
    def __iter__(s): return iter([[0,1,2],[3]])
    def __len__(s): return 2
def fn(rank, pos):
    out={}
    def t(name,f):
        try:
            with warnings.catch_warnings(record=True) as w:
                warnings.simplefilter("always"); out[name]=f(), [str(x.message)[:200] for x in w]
        except BaseException as e: out[name]="!! %s %s"%(type(e).__name__,str(e)[:260])
    ds=list(range(16))
    t("taken over sequential", lambda: L(idist.auto_dataloader(DataLoader(ds,batch_size=8))))
    t("sampler len", lambda: L(idist.auto_dataloader(ds,sampler=SL(),batch_size=4)))
    def shard_end():
        l=idist.auto_dataloader(It(),shard=True,batch_size=4); l.resume(pos,False); return L(l)
    t("shard end", shard_end)
    def load():
        l=idist.auto_dataloader(It(),shard=True,batch_size=4); m=torch.nn.Linear(1,1); idist.load_checkpoint("/tmp/review/s.pt",loader=l); return L(l)
    t("shard end checkpoint", load)
    for r in range(2):
        if r==rank: print(rank, *("\n   %s: %s"%kv for kv in out.items()), flush=True)
        else:
            import time; time.sleep(.3)
if __name__=="__main__":
    l=idist.auto_dataloader(It(),shard=True,batch_size=4); it=iter(l); [next(it) for _ in range(3)]; pos=l.position(); print({k:pos[k] for k in("epoch","batches","samples")}); idist.save_checkpoint("/tmp/review/s.pt",loader=l)
    pos.pop("states")
    l=idist.auto_dataloader(list(range(8)),shuffle=True,seed=1,batch_size=2); it=iter(l); a=[next(it).tolist() for _ in range(2)]; p=l.position()
    m=idist.auto_dataloader(list(range(8)),shuffle=False,batch_size=2); m.resume(p,True); print("shuffle changed", a, L(m))
    # of-rank batch sampler on 2 ranks, then on 1
    p=dict(p,facts=None,seed=None,samples=None,batches=2); m=idist.auto_dataloader(list(range(16)),batch_sampler=BatchSampler(DistributedSampler(range(16),1,0,shuffle=False),2,False)); m.resume(p,False); print("of rank", L(m))
    class Aug(Dataset):
        e=0
        def set_epoch(s,e): s.e=e
        def __len__(s): return 4
        def __getitem__(s,i): return s.e
    mk=lambda: idist.auto_dataloader(Aug(),batch_size=1)
    l=mk(); list(l); list(l); it=iter(l); next(it); p=l.position(); r=L(it); m=mk(); m.resume(p,True); print("data set's epoch",r,L(m))
    idist.finalize() if hasattr(idist,"finalize") else None
    idist.spawn("gloo",fn,(pos,),nproc_per_node=2)
