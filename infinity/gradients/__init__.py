"""From autograd's gradient to a stored, reduced and measured one."""
