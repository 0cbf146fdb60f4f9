'use strict';
// Takes messages and answers them by a script; tells what it saw of each.
//
//     node consume.js URL ADDRESS [--count 1] [--credit 10] [--answers accept,...] [--lives 1] [--goodbye close]
//         [--drain] [--topic] [--second] [--settled] [--window FRAMES]
//
// --count: messages of each life; a life is a link, each of the same name. 0: until the other side detaches the link.
// --answers: of the first message, of the second …, the last for all that follow: accept, reject, release, modify,
//     fail (modified with delivery-failed), later (… and due in 300 ms), undeliverable (… and undeliverable-here), nothing.
// --goodbye: how a life ends: close or detach (of the link), session or connection (that is ended, the link is not),
//     never (somebody must kill this process).
// --drain: drains the link, and ends when that is answered.
// --second: it settles only after the sender has (rcv-settle-mode second). --settled: it asks for settled messages.
// --window: how many unsettled messages the session takes before the sender must wait for more window.

const { rhea, read, connect, tell, fail, sha256 } = require('./kit.js');

const options = read({
    count: '1', credit: '10', answers: 'accept', lives: '1', goodbye: 'close',
    drain: false, topic: false, second: false, settled: false, window: '',
});
const [count, credit] = [Number(options.count), Number(options.credit)];
const script = options.answers.split(',');
const waiting = []; // to be answered
let lives = Number(options.lives);
let seen = 0;
let answered = 0;
let drained; // the link that is

const ANSWERS = {
    accept: (delivery) => delivery.accept(),
    reject: (delivery) => delivery.reject({ condition: 'test:bad', description: 'no good' }),
    release: (delivery) => delivery.release(),
    modify: (delivery) => delivery.modified({}),
    fail: (delivery) => delivery.modified({ delivery_failed: true, message_annotations: { 'x-opt-seen': 'yes' } }),
    later: (delivery) => delivery.modified({
        delivery_failed: true,
        message_annotations: { 'x-opt-delivery-time': rhea.types.wrap_timestamp(Date.now() + 300) },
    }),
    undeliverable: (delivery) => delivery.modified({ delivery_failed: true, undeliverable_here: true }),
    nothing: () => {},
};

function describe(message, answer) {
    const body = message.body && message.body.content !== undefined ? message.body.content : message.body;
    return {
        n: message.application_properties && message.application_properties.n,
        answer,
        size: body.length,
        hash: sha256(body),
        delivery_count: message.delivery_count,
        first_acquirer: message.first_acquirer,
        durable: message.durable,
        priority: message.priority,
        ttl: message.ttl,
        message_id: message.message_id,
        correlation_id: message.correlation_id,
        subject: message.subject,
        content_type: message.content_type,
        message_annotations: message.message_annotations,
        application_properties: message.application_properties,
    };
}

const connection = connect(options);
connection.on('session_close', () => connection.close());

function live() {
    const receiver = connection.open_receiver({
        name: 'interop',
        source: { address: options.address, capabilities: options.topic ? ['topic'] : undefined },
        rcv_settle_mode: options.second ? 1 : 0,
        snd_settle_mode: options.settled ? 1 : 0,
        autoaccept: false,
        credit_window: 0,
    });
    let owed; // credit that this life has not given yet
    let taken = 0;
    function give(most) {
        const given = Math.min(most, owed);
        owed -= given;
        receiver.add_credit(given);
    }
    receiver.on('receiver_open', () => {
        if (!receiver.source?.address) return; // refused: the reason follows
        tell({ attached: true });
        owed = (count || Infinity) - taken; // on a new connection that rhea has made, the credit is not known
        if (options.drain) {
            receiver.add_credit(credit);
            receiver.drain_credit();
        } else {
            give(credit);
        }
    });
    receiver.on('message', ({ message, delivery }) => {
        const answer = script[Math.min(seen++, script.length - 1)];
        tell(describe(message, answer));
        waiting.push({ receiver, delivery, answer, give, last: ++taken === count && !options.drain });
        if (waiting.length === 1) setImmediate(answerNext);
    });
    receiver.on('settled', ({ delivery }) => {
        tell({ settled: delivery.id });
        if (delivery.last) end(receiver);
    });
    receiver.on('receiver_drained', () => {
        tell({ drained: true });
        drained = receiver;
        if (!waiting.length) end(receiver);
    });
    receiver.on('receiver_error', () => {
        if (count > 0) fail(receiver.error);
        tell({ detached: receiver.error.condition });
        connection.close();
    });
    receiver.on('receiver_close', () => {
        if (!receiver.error) setImmediate(next); // rhea forgets the link two ticks later
    });
}

// One answer in each round of the loop: rhea says one outcome for two neighbours that it hears of in one tick.
function answerNext() {
    const { receiver, delivery, answer, give, last } = waiting.shift();
    delivery.last = last;
    ANSWERS[answer](delivery);
    answered++;
    if (!options.drain && answer !== 'nothing') give(1);
    if ((last && !options.second) || (drained && !waiting.length)) end(receiver);
    if (waiting.length) setImmediate(answerNext);
}

function end(receiver) {
    tell({ answered });
    if (options.goodbye === 'close') receiver.close();
    else if (options.goodbye === 'detach') receiver.detach();
    else if (options.goodbye === 'session') receiver.session.close();
    else if (options.goodbye === 'connection') connection.close();
}

function next() {
    drained = undefined;
    if (--lives > 0) live();
    else connection.close();
}

live();
