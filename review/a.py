import traceback, warnings, copy, pickle
import numpy as np, torch, random
from torch.utils.data import *
import ignite_dist as idist
def t(f):
    try: print(f.__name__, "->", f())
    except BaseException as e: print(f.__name__, "!!", type(e).__name__, str(e)[:300])
class S(Sampler):
    def __init__(s, n, g): s.n, s.generator = n, g
    def __iter__(s): return iter(s.generator.permutation(s.n).tolist())
    def __len__(s): return s.n
class SN(S):
    def __iter__(s): return iter(range(s.n)) if s.generator is None else iter(torch.randperm(s.n, generator=s.generator).tolist())
def npgen(): return list(idist.auto_dataloader(list(range(8)), sampler=S(8, np.random.default_rng(0)), batch_size=4))
def nonegen(): return list(idist.auto_dataloader(list(range(8)), sampler=SN(8, None), batch_size=4))
class EpS(Sampler):
    epoch=0
    def __iter__(s): return iter(torch.randperm(8, generator=torch.Generator().manual_seed(s.epoch)).tolist())
    def __len__(s): return 8
    def set_epoch(s, e): s.epoch=e
def auto_epoch():
    def mk(): return idist.auto_dataloader(list(range(8)), sampler=EpS(), batch_size=2)
    l=mk(); list(l); list(l)
    it=iter(l); a=[next(it).tolist()]; pos=l.position(); rest=[b.tolist() for b in it]
    m=mk(); m.resume(pos, True); return rest, [b.tolist() for b in m]
class BS(Sampler):
    epoch=0
    def set_epoch(s,e): s.epoch=e
    def __len__(s): return 2+s.epoch
    def __iter__(s): return iter([[i,i+1] for i in range(len(s))])
def bs_len():
    def mk(): return idist.auto_dataloader(list(range(30)), batch_sampler=BS())
    l=mk(); l.set_epoch(5); it=iter(l); [next(it) for _ in range(4)]; pos=l.position()
    m=mk(); m.resume(pos,True); return [b.tolist() for b in m]
def dist_in_bs():
    l=idist.auto_dataloader(list(range(8)), batch_sampler=BatchSampler(DistributedSampler(range(8),1,0),4,False))
    out=[]
    for e in range(3):
        l.set_epoch(e); out.append([b.tolist() for b in l])
    return out
def last_other_bs():
    l=idist.auto_dataloader(list(range(10)), batch_size=4, shuffle=False); it=iter(l); [next(it) for _ in range(3)]
    pos=l.position(); r=[]
    for b in (1,2,3,5,6):
        m=idist.auto_dataloader(list(range(10)), batch_size=b, shuffle=False)
        try: m.resume(pos,True); r.append((b,[x.tolist() for x in m]))
        except ValueError as e: r.append((b,str(e)))
    return r
def seq_taken():
    d=DataLoader(list(range(10)), sampler=SequentialSampler(range(5)), batch_size=5)
    return len(list(d)), len(list(idist.auto_dataloader(d)))
def gen_taken():
    r=[]
    for k in (1,2):
        torch.manual_seed(k); d=list(range(6)); g=torch.Generator().manual_seed(0)
        r.append([b.tolist() for b in idist.auto_dataloader(DataLoader(d, sampler=RandomSampler(d, generator=g), batch_size=6))])
        torch.manual_seed(k); g=torch.Generator().manual_seed(0)
        r.append([b.tolist() for b in idist.auto_dataloader(d, sampler=RandomSampler(d, generator=g), batch_size=6)])
    return r
class It(IterableDataset):
    def __iter__(s): return iter(range(10))
def coll_none():
    return list(DataLoader(It(), batch_size=4, collate_fn=None)), list(idist.auto_dataloader(It(), shard=True, batch_size=4, collate_fn=None))
class ItL(It):
    def __len__(s): raise NotImplementedError
def len_raises(): return list(idist.auto_dataloader(ItL(), shard=True, batch_size=4))
def len_resume():
    l=idist.auto_dataloader(ItL(), batch_size=4); it=iter(l); next(it); p=l.position()
    m=idist.auto_dataloader(ItL(), batch_size=4); m.resume(p,True); return list(m)
class SL(Sampler):
    def __iter__(s): return iter(range(8))
    def __len__(s): raise NotImplementedError
def sampler_len():
    from ignite_dist.samplers import DistributedProxySampler as P
    print([b.tolist() for b in idist.auto_dataloader(list(range(8)), sampler=SL(), batch_size=4)])
    return list(P(SL(),2,0,batch_size=4))
def sub_str():
    return list(idist.auto_dataloader(Subset({"a":1,"b":2}, ["a","b"]), batch_size=2))
def conj(): return list(idist.auto_dataloader(TensorDataset(torch.ones(3,2,dtype=torch.complex64).conj()), batch_size=3))
def empty():
    r=[]
    for kw in ({},{"batch_size":2},{"shuffle":True},{"exact":True},{"shuffle":True,"batch_size":3,"drop_last":True}): r.append(len(list(idist.auto_dataloader([],**kw))))
    return r
def dc():
    l=idist.auto_dataloader(list(range(8)), shuffle=True, batch_size=2); it=iter(l); next(it)
    m=copy.deepcopy(l); q=pickle.loads(pickle.dumps(l)); return list(m)==list(l)==list(q)
for f in (npgen,nonegen,auto_epoch,bs_len,dist_in_bs,last_other_bs,seq_taken,gen_taken,coll_none,len_raises,len_resume,sampler_len,sub_str,conj,empty,dc): t(f)
