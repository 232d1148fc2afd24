"""A GAN as PyTorch's DCGAN tutorial has it: two optimizers, two backwards for the discriminator."""

import faults
import torch
from torch import nn

torch.set_num_threads(1)
nz, batch_size = 64, 64


def real_images(step):
    faults.slow_decode(batch_size)
    faults.tokenize("a caption " * 10)
    return torch.randn(batch_size, 256)


netG = nn.Sequential(nn.Linear(nz, 512), nn.ReLU(), nn.Linear(512, 256), nn.Tanh())
netD = nn.Sequential(nn.Linear(256, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1), nn.Sigmoid())
criterion = nn.BCELoss()
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4)
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4)
board = faults.RunLogger()
kept = faults.clutter()
faults.start_background()
try:
    for i in range(150):
        netD.zero_grad()
        real = real_images(i)
        label = torch.full((batch_size,), 1.0)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward()
        noise = torch.randn(batch_size, nz)
        fake = netG(noise)
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
        board.log({"loss": 0.0})
        faults.gradient_stats(netD)
        faults.show_progress(i)
        faults.collect_garbage()
        faults.trouble(i)
finally:
    faults.clean_up()
