"""The reference transport: a broker in this process, in virtual time if need be, with weather on demand."""

from links.memory.broker import MemoryBroker as MemoryBroker
from links.memory.link import MemoryLink as MemoryLink
from links.memory.log import Delivered as Delivered
from links.memory.log import Entry as Entry
from links.memory.log import Fates as Fates
from links.memory.log import Published as Published
from links.memory.log import Returned as Returned
from links.memory.log import Said as Said
from links.memory.log import Unsaid as Unsaid
from links.memory.log import replay as replay
from links.memory.publisher import MemoryPublisher as MemoryPublisher
from links.memory.source import MemoryQueue as MemoryQueue
