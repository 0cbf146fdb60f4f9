"""The weather between clients and an embedded broker: cables that fail, and what an operator does to the broker."""

from __future__ import annotations

from random import Random

import trio

from links.amqp.events import Condition
from links.errors import ConnectionBroken
from tests.weather.amqp_watched import WatchedBroker
from tests.weather.cable import Cable

__all__ = ["DEAD", "FAULTS", "QUEUE", "Weather"]

QUEUE, DEAD = "orders", "orders.dead"
FAULTS = (
    *("cut", "cut", "cut", "sever_peer", "freeze", "freeze_out", "freeze_back", "freeze_peer", "thaw"),
    *("detach", "detach_dead", "end_session", "close_connection", "refuse", "refuse", "by_session"),
    *("refuse_dead", "refuse_dead", "refuse_dead", "down", "slow", "slow"),
)
_GONE = Condition("amqp:resource-deleted", "the queue was deleted")


class Weather:
    """One broker's."""

    def __init__(self, server: WatchedBroker, latency: float, dice: Random) -> None:
        self.server = server
        self.latency = latency
        """Of new cables; seconds, each way."""
        self.dice = dice
        self.cables: list[Cable] = []
        self.down = False
        self.nursery: trio.Nursery

    async def connect(self) -> Cable:
        """For `AmqpBroker(connect=…)`."""
        await trio.lowlevel.checkpoint()
        if self.down:
            raise ConnectionBroken("nobody is there")
        cable = Cable(self.server.connect_in_memory(), self.latency)
        self.cables = [each for each in self.cables if not each.is_cut] + [cable]
        self.nursery.start_soon(cable.carry)
        return cable

    def fault(self, name: str) -> None:
        """Let it happen."""
        server, dice = self.server, self.dice
        server.story.stolen = True
        cables = [each for each in self.cables if not each.is_cut]
        some = cables if dice.random() < 0.5 else cables[:1]
        peers = server.peers[:] if dice.random() < 0.5 else server.peers[:1]
        match name:
            case "cut":
                for cable in some:
                    cable.cut()
            case "sever_peer":
                for peer in peers:
                    peer.sever()
            case "freeze" | "freeze_out" | "freeze_back":
                for cable in some:
                    if name != "freeze_back":
                        cable.out.freeze()
                    if name != "freeze_out":
                        cable.back.freeze()
                self.nursery.start_soon(
                    self.later, dice.choice([0.1, 1.0, 100.0]), "thaw" if dice.random() < 0.5 else "cut"
                )
            case "freeze_peer":
                for peer in peers:
                    peer.freeze()
            case "thaw":
                self.thaw()
            case "detach":
                for peer in server.peers:
                    peer.detach(QUEUE, _GONE)
            case "detach_dead":
                for peer in server.peers:
                    peer.detach(DEAD, _GONE)
            case "end_session":
                for peer in peers:
                    server.end_sessions(peer, at_most=2)
            case "close_connection":
                for peer in peers:
                    peer.close(Condition("amqp:connection:forced", "by an operator"))
            case "refuse":
                server.refuse(QUEUE, Condition("amqp:not-found", "there is no such queue"))
                for peer in server.peers:
                    peer.detach(QUEUE, _GONE)
                self.nursery.start_soon(self.later, dice.choice([0.1, 3.0, 30.0]), "admit")
            case "admit":
                server.refuse(QUEUE, None)
            case "by_session":
                server.refuses_by_session = not server.refuses_by_session
            case "refuse_dead":
                server.refuse(DEAD, Condition("amqp:unauthorized-access", "it is closed"))
                for peer in server.peers:
                    peer.detach(DEAD, _GONE)
                self.nursery.start_soon(self.later, dice.choice([1.0, 10.0, 100.0]), "admit_dead")
            case "admit_dead":
                server.refuse(DEAD, None)
            case "down":
                self.down = True
                for cable in cables:
                    cable.cut()
                self.nursery.start_soon(self.later, dice.choice([0.1, 3.0, 30.0]), "up")
            case "up":
                self.down = False
            case "slow":
                self.latency = dice.choice([0.0, 0.05, 1.0])
                for cable in cables:
                    cable.latency = self.latency
            case _:
                raise ValueError(name)

    async def later(self, seconds: float, name: str) -> None:
        await trio.sleep(seconds)
        self.fault(name)

    def thaw(self) -> None:
        for cable in self.cables:
            cable.out.thaw()
            cable.back.thaw()
        for peer in self.server.peers:
            peer.thaw()

    def calm_down(self) -> None:
        """From now on all is well."""
        for name in ("thaw", "admit", "admit_dead", "up"):
            self.fault(name)
        self.latency = 0.001
