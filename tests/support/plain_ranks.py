"""Makes ranks share no memory unless a case asks for it, in programs of ranks that are about how weights are
sent. Imported for that.
"""

import infinity

infinity.Config.__init__.__kwdefaults__["shared_memory"] = False
