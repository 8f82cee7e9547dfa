import torch; from torch import nn; import ignite_dist as idist
m=nn.Sequential(torch.compile(nn.Linear(2,2)),nn.ReLU()); print(idist.model_state(m).keys()); idist.load_model_state(m,m.state_dict()); idist.save_checkpoint("/tmp/review/m.pt",model=m); print("ok")
