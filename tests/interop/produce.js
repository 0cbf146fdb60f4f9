'use strict';
// Sends messages and waits for every outcome; tells how many there were of each.
//
//     node produce.js URL ADDRESS [--count 1] [--size 1024] [--first 0] [--settled] [--relay]
//
// Message n has the id `id-n` and a body of `size` bytes, `n.n.n.n…`. --settled: sent as settled, there are no outcomes.
// --relay: the link has no address, each message says its own.

const { rhea, read, connect, tell, fail } = require('./kit.js');

const options = read({ count: '1', size: '1024', first: '0', settled: false, relay: false });
const [count, size, first] = [Number(options.count), Number(options.size), Number(options.first)];
const outcomes = { accepted: 0, rejected: 0, released: 0, modified: 0 };
let sent = 0;

function message(n) {
    return {
        durable: true,
        priority: 7,
        ttl: 3600000,
        message_id: `id-${n}`,
        correlation_id: `of-${n}`,
        subject: 'interop',
        content_type: 'application/octet-stream',
        to: options.relay ? options.address : undefined,
        message_annotations: { 'x-opt-lane': 'fast' },
        application_properties: { n, name: 'Zoë', urgent: true },
        body: rhea.message.data_section(Buffer.alloc(size, `${n}.`)),
    };
}

const connection = connect(options);
const sender = connection.open_sender({
    target: options.relay ? {} : { address: options.address },
    snd_settle_mode: options.settled ? 1 : 0,
    treat_modified_as_released: false,
});
const room = sender.session.outgoing.available();

function finish() {
    tell({ sent, ...outcomes });
    connection.close();
}

function whenWritten() { // what is settled leaves rhea's memory when it is written
    if (sender.session.outgoing.available() === room) finish();
    else setImmediate(whenWritten);
}

sender.on('sendable', () => {
    for (let credit = sender.credit; credit > 0 && sent < count && sender.sendable(); credit--) {
        sender.send(message(first + sent++));
        if (options.settled && sent === count) whenWritten();
    }
});
for (const outcome of Object.keys(outcomes)) {
    sender.on(outcome, ({ delivery }) => {
        outcomes[outcome]++;
        if (outcome === 'rejected' && delivery.remote_state.error) tell({ rejected: delivery.remote_state.error.condition });
    });
}
sender.on('settled', () => {
    if (Object.values(outcomes).reduce((sum, each) => sum + each) === count) finish();
});
sender.on('sender_error', () => fail(sender.error));
