"""torch.compile(mode="reduce-overhead"): a small GPT trained, with evaluation in between; the optimizer is not compiled."""
import sys
import torch
from gpt_model import GPT

torch.manual_seed(0)
model = GPT(vocab=512, dim=128, layers=2, heads=4, ctx=128).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
run = torch.compile(model, mode="reduce-overhead")


def batch(rows=4):
    ids = torch.randint(0, 512, (rows, 129), device="cuda")
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


for step in range(6):
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast("cuda", torch.bfloat16, enabled="amp" in sys.argv):
        _, loss = run(*batch())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item())
    if "eval" in sys.argv and step in (3, 4, 5):
        with torch.no_grad():
            torch.compiler.cudagraph_mark_step_begin()
            print("eval", run(*batch(8))[1].item())
