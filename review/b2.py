import copy, pickle, gc, time
import numpy as np, torch, random
from torch import nn
from torch.utils.data import *
import ignite_dist as idist
import multiprocessing as mp
def t(f):
    try: print(f.__name__, "->", f(), flush=True)
    except BaseException as e: print(f.__name__, "!!", type(e).__name__, str(e)[:300], flush=True)
L=lambda l:[b.tolist() for b in l]
def dc():
    l=idist.auto_dataloader(list(range(8)), shuffle=True, batch_size=2); it=iter(l); next(it)
    m=copy.deepcopy(l); q=pickle.loads(pickle.dumps(l)); a=(L(m),L(q),L(l)); return a[0]==a[1]==a[2]
class It(IterableDataset):
    def __iter__(s): return iter(range(24))
def persist_shard():
    l=idist.auto_dataloader(It(), shard=True, batch_size=4, num_workers=2, persistent_workers=True)
    it=iter(l); [next(it) for _ in range(3)]; p=l.position(); list(it)
    l.resume(p,True); return L(l)
def persist_map():
    l=idist.auto_dataloader(list(range(24)), batch_size=4, shuffle=True,seed=3,num_workers=2, persistent_workers=True)
    it=iter(l); [next(it) for _ in range(3)]; p=l.position(); r=L(it)
    l.resume(p,True); return r==L(l), len(list(l))
def gc_workers():
    out=[]
    for mk in (lambda **k: DataLoader(**k), lambda **k: idist.auto_dataloader(k.pop("dataset"),**k)):
        gc.collect(); n0=len(mp.active_children())
        gc.disable()
        l=mk(dataset=list(range(24)), batch_size=4, num_workers=2, persistent_workers=True); list(l); del l; time.sleep(.3)
        out.append(len(mp.active_children())-n0); gc.enable(); gc.collect()
    return out
class OwnG(Sampler):
    def __init__(s,n): s.n=n; s.rng=np.random.default_rng(0)
    def __len__(s): return s.n
    def __iter__(s):
        for _ in range(s.n): yield int(s.rng.integers(10**6))
class DS(Dataset):
    def __getitem__(s,i): return i
    def __len__(s): return 10**6
def two_at_once():
    def mk(): return idist.auto_dataloader(DS(), batch_sampler=BatchSampler(OwnG(3000),1,False),seed=1)
    a=L(mk()); l=mk(); i=iter(l); x=[next(i).tolist() for _ in range(10)]; j=iter(l); next(j); x+=L(i); return a==x, next(k for k in range(3000) if a[k]!=x[k]) if a!=x else None
class Adaptive(Sampler):
    def __init__(s): s.w=0
    def __len__(s): return 8
    def __iter__(s):
        for _ in range(8): yield s.w
def adaptive():
    out=[]
    for mk in (DataLoader, lambda d,**k: idist.auto_dataloader(d,**k)):
        s=Adaptive(); l=mk(list(range(10)), batch_size=2, sampler=s); o=[]
        for b in l: o.append(b.tolist()); s.w+=1
        out.append(o)
    return out
class Gan(nn.Module):
    def __init__(s): super().__init__(); s.g=nn.DataParallel(nn.Linear(2,2)); s.step=0
    def get_extra_state(s): return s.step
    def set_extra_state(s,x): s.step=x
def extra():
    m=Gan(); m.step=7; st=idist.model_state(m); n=Gan(); idist.load_model_state(n,st); return st.keys(), n.step
def own_state():
    m=Gan(); idist.load_model_state(m, m.state_dict())
def ckpt():
    m=Gan(); m.step=7; idist.save_checkpoint("/tmp/review/c.pt",model=m); n=Gan(); idist.load_checkpoint("/tmp/review/c.pt",model=n); return n.step
def meta():
    m=nn.Sequential(nn.BatchNorm1d(2)); from torch.nn.parallel import DataParallel
    st=DataParallel(m).state_dict(); k=list(st._metadata); idist.load_model_state(m,st); return k, list(st._metadata), list(st)
def digest_time():
    from ignite_dist.data.orders import facts_of
    r=[]
    x=[torch.zeros(16<<20)]*1  # 64 MB
    import resource
    a=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; s=time.time(); facts_of(x,None,{}); r.append((time.time()-s, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss-a)/1e3))
    s=time.time(); facts_of(Subset(range(10**6), range(10**6)),None,{}); r.append(time.time()-s)
    s=time.time(); facts_of(Subset(range(10**6), torch.arange(10**6)),None,{}); r.append(time.time()-s)
    return r
def lists():
    calls=[]
    class Lazy(list):
        def __getitem__(s,i): calls.append(i); return super().__getitem__(i)
    idist.auto_dataloader(Lazy(range(9)), batch_size=3); return calls
def late_epoch():
    l=idist.auto_dataloader(list(range(8)),batch_size=2,shuffle=True,seed=0); 
    it=iter(l); next(it); l.set_epoch(1); next(it); return {k:l.position()[k] for k in("epoch","batches")}
def nested():
    l=idist.auto_dataloader(list(range(8)),batch_size=2,shuffle=True,seed=0); n=[]
    for a in l:
        for b in l: pass
        n.append((l.position()["epoch"],l.position()["batches"]))
    return n
class HF(Dataset):
    def __len__(s): return 10
    def __getitem__(s,i): return {"x": i}
def hf():
    return [L([b["x"] if not isinstance(b["x"],list) else torch.tensor(b["x"])]) for b in idist.auto_dataloader(HF(), sampler=BatchSampler(SequentialSampler(range(10)),4,False), batch_size=None)]
def obj():
    from ignite_dist.data.orders import facts_of
    a=np.array([[1,"abc"+str(random.random())]]*2,dtype=object); b=np.array([[x*1 if isinstance(x,int) else ("z"+x)[1:] for x in r] for r in a],dtype=object)
    return facts_of(a,None,{})["contents"], facts_of(b,None,{})["contents"], (a==b).all()
def npmod(): 
    import sys; return "numpy" in sys.modules

def compiled_child():
    m=nn.Sequential(torch.compile(nn.Linear(2,2)),nn.ReLU()); idist.save_checkpoint("/tmp/review/d.pt",model=m)
def compiled_state():
    m=nn.Sequential(torch.compile(nn.Linear(2,2)),nn.ReLU()); return idist.model_state(m).keys()
def iter_set():
    l=idist.auto_dataloader(list(range(16)),shuffle=True,seed=0,batch_size=4); it=iter(l); l.set_epoch(1); a=L(it); l.set_epoch(0); return a==L(l)
def dt(n):
    from ignite_dist.data.orders import facts_of
    import resource
    x=[torch.zeros(n)]
    a=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; s=time.time(); facts_of(x,None,{}); return (n*4>>20,"MB", round(time.time()-s,2), "s", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss-a)/1e3)
def d1(): return dt(4<<20)
def d2():
    from ignite_dist.data.orders import facts_of
    s=time.time(); facts_of(Subset(range(10**6), range(10**6)),None,{}); return time.time()-s
def d3():
    from ignite_dist.data.orders import facts_of
    s=time.time(); facts_of(Subset(range(2*10**5), torch.arange(2*10**5)),None,{}); return time.time()-s
def main_keys():
    m=Gan(); return list(m.state_dict())
for f in (compiled_child,compiled_state,iter_set,extra,own_state,ckpt,lists,late_epoch,nested,hf,obj,d1,d2,d3): t(f)
