"""The vocabulary of trio-settlement, and its decisions. Pure: no trio, no broker, no clock, no await."""

from settlement.delays import Copies as Copies
from settlement.delays import Hold as Hold
from settlement.delays import Native as Native
from settlement.delays import Scheduled as Scheduled
from settlement.delays import Stored as Stored
from settlement.delivery import Delivery as Delivery
from settlement.delivery import Destination as Destination
from settlement.delivery import Letter as Letter
from settlement.ledger import Balance as Balance
from settlement.ledger import Ledger as Ledger
from settlement.ledger import Line as Line
from settlement.outcomes import Ack as Ack
from settlement.outcomes import Drop as Drop
from settlement.outcomes import Outcome as Outcome
from settlement.outcomes import Retry as Retry
from settlement.outcomes import RetryAfter as RetryAfter
from settlement.plans import Plan as Plan
from settlement.plans import Publish as Publish
from settlement.plans import Wait as Wait
from settlement.policy import DeadLetter as DeadLetter
from settlement.policy import FailFast as FailFast
from settlement.policy import Policy as Policy
