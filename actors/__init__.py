"""Who is alive, and who talks to whom: supervised actors in trio nurseries, one file per actor."""

from actors.connection import connected as connected
from actors.errors import HandlerFailed as HandlerFailed
from actors.errors import LinkGaveUp as LinkGaveUp
from actors.errors import ObserverFailed as ObserverFailed
from actors.running_subscription import Statistics as Statistics
from actors.runtime import Runtime as Runtime
from actors.runtime import open_runtime as open_runtime
from actors.subscription import BatchSubscription as BatchSubscription
from actors.subscription import Subscription as Subscription
