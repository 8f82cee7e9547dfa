import gc,time,multiprocessing as mp, torch
from torch.utils.data import *
import ignite_dist as idist
gc.disable()
l=idist.auto_dataloader(list(range(24)), batch_size=4, num_workers=2, persistent_workers=True); list(l); del l; time.sleep(.5); print(len(mp.active_children()))
gc.collect(); time.sleep(.5); print("after gc",len(mp.active_children()))
