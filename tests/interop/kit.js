'use strict';
// What the programs share: `node PROGRAM.js URL ADDRESS [--option value ...]` in, a JSON line for each fact out.
// The first thing that goes wrong is a line {error, description}, and the end with exit code 1.

const { createHash } = require('crypto');
const { parseArgs } = require('util');
const rhea = require('rhea');

const LOGIN = {
    reconnect: { type: 'boolean' }, // rhea's own: the same links on a new connection
    idle: { type: 'string' }, // milliseconds of silence that we allow the peer
    anonymous: { type: 'boolean' }, // SASL ANONYMOUS; without it and without a user in the URL there is no SASL layer
};

function tell(fact) {
    process.stdout.write(JSON.stringify(fact) + '\n');
}

function fail(error) {
    const { condition, description, message } = error || {};
    tell({ error: condition || 'unknown', description: description || message || '' }); // a pipe is written at once
    process.exit(1);
}

// The options with their defaults (all are strings but flags, which default to false), the URL and the address.
function read(defaults) {
    const options = { ...LOGIN };
    for (const [name, value] of Object.entries(defaults)) {
        options[name] = value === false ? { type: 'boolean' } : { type: 'string', default: value };
    }
    const { values, positionals } = parseArgs({ options, allowPositionals: true });
    return { ...values, url: new URL(positionals[0]), address: positionals[1] };
}

// A container of its own, so that what it hears is this connection's alone.
function connect({ url, reconnect, idle, anonymous, window }) {
    const container = rhea.create_container();
    container.on('error', fail);
    container.on('protocol_error', fail);
    container.on('session_error', ({ session }) => fail(session.error));
    container.on('connection_error', ({ error }) => fail(error));
    container.on('connection_close', () => {});
    container.on('disconnected', ({ error, reconnecting }) => {
        if (reconnecting) tell({ disconnected: true });
        else fail(error || { condition: 'disconnected' });
    });
    const login = { host: url.hostname, port: Number(url.port), reconnect: Boolean(reconnect), tcp_no_delay: true };
    if (window) login.session_buffer_size = Number(window);
    if (idle) login.idle_time_out = Number(idle);
    if (anonymous) login.username = 'anonymous';
    if (url.username) login.username = decodeURIComponent(url.username);
    if (url.password) login.password = decodeURIComponent(url.password);
    return container.connect(login);
}

function sha256(data) {
    return createHash('sha256').update(data).digest('hex');
}

module.exports = { rhea, read, connect, tell, fail, sha256 };
