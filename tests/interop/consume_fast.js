'use strict';
// How much CPU rhea needs for a message: takes and accepts them with the least that rhea allows.
//
//     node consume_fast.js URL ADDRESS [--count 20000] [--credit 1000] [--read HEADER]
//
// --read: look at body, message id and this header of each.
//
// Tells {count, wall_seconds, cpu_seconds}, both from the first message until the broker has answered the goodbye that
// follows the last one's answer.

const { read, connect, tell } = require('./kit.js');

const options = read({ count: '20000', credit: '1000', read: '' });
const count = Number(options.count);
let taken = 0;
let wall, cpu;

const connection = connect(options);
connection.open_receiver({ source: { address: options.address }, credit_window: Number(options.credit) });
connection.on('message', ({ message }) => { // rhea accepts it by itself, and tops the credit up
    if (taken++ === 0) [wall, cpu] = [process.hrtime.bigint(), process.cpuUsage()];
    if (options.read && !(message.body.content.length && message.message_id && message.application_properties[options.read])) {
        throw new Error('nothing to read');
    }
    if (taken === count) connection.close();
});
connection.on('connection_close', () => {
    const { user, system } = process.cpuUsage(cpu);
    tell({ count, wall_seconds: Number(process.hrtime.bigint() - wall) / 1e9, cpu_seconds: (user + system) / 1e6 });
});
