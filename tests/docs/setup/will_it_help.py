from torch import nn

import heeler

model = nn.Linear(8, 3)
handle = heeler.attach(model, heeler.Sampler(100, batch_size=10))
