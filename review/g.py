import torch
from torch import nn
import ignite_dist as idist
from torch.utils.data import *
from torch._dynamo.eval_frame import OptimizedModule
class Block(nn.Module):
    def __init__(s,n): super().__init__(); s.l=nn.Linear(n,n)
    def forward(s,x): return s.l(x)
class Net(nn.Module):
    def __init__(s,n): super().__init__(); s.b=Block(n); s.c=torch.compile(Block(n),backend="eager")
    def forward(s,x): return s.c(s.b(x))
def fn(rank):
    for fix in (0,1):
        if fix: OptimizedModule.__bool__=lambda s: True
        m=idist.auto_model(Net(4),strategy="fsdp",wrap=[Block])
        for k in range(2):
            try:
                st=idist.model_state(m); print(rank, fix,k, {n:tuple(v.shape) for n,v in st.items()}, flush=True)
                idist.load_model_state(m,st); print(rank,"loaded")
            except BaseException as e: print(rank,fix,"!!",type(e).__name__,str(e)[:300],flush=True); break
            m(torch.ones(2,4)).sum().backward()
if __name__=="__main__":
    idist.spawn("gloo",fn,nproc_per_node=2)
