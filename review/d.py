import numpy as np, sys
from ignite_dist.data.orders import facts_of
a=np.array([[i,"item %d"%i] for i in range(9)],dtype=object); print(facts_of(a,None,{})["contents"])
