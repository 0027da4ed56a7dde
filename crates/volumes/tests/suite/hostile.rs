//! Names and options of somebody who wants more than a volume, requests that do not end.

use crate::fixture::{Plugin, as_root, needs, raw, request};
use serde_json::json;
use std::{io::Write, os::unix::net::UnixStream};

#[test]
fn names_and_options_reach_nothing_but_a_refusal() {
    needs!(as_root());
    let plugin = Plugin::new();
    let long = "a".repeat(129);
    let names = [
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "/etc",
        "a\nb",
        "a\0b",
        "-rf",
        "--help",
        "$(reboot)",
        "a b",
        "a@b",
        "\u{e9}",
        &long,
    ];
    for name in names {
        for call in ["Create", "Remove", "Mount", "Unmount", "Path", "Get"] {
            let answer = plugin.call(call, &json!({ "Name": name, "ID": "a" }));
            assert_eq!(answer.status, 400, "{call} {name:?}: {answer:?}");
        }
    }
    for (key, value) in [
        ("size", "1G,state=/etc"),
        ("size", "1G | readonly"),
        ("size", "-1"),
        ("size", "\n1G"),
        ("map", "0/0,hide=*"),
        ("map", "0/0 | throttle:read-rate=1"),
        ("map", "--engine=kernel"),
        ("owner", "0:0,perms=a=rwx"),
        ("owner", "--survive"),
        ("mode", "a+rwx\\,delete-deny"),
        ("pool", "--help"),
        ("pool", "tank@snapshot"),
        ("pool", "../tank"),
        ("from", "a"),
        ("o", "bind"),
        ("device", "/etc"),
        ("size\n", "1G"),
    ] {
        let answer = plugin.create("x", &json!({ key: value }));
        assert_eq!(answer.status, 400, "{key}={value:?}: {answer:?}");
    }
    let body = |value: &str| format!("{{\"Name\":\"x\",\"Opts\":{value}}}");
    for value in ["[]", "{\"size\":1}", "{\"size\":null}", "\"size\"", "{"] {
        assert_eq!(request(&plugin.socket(), "VolumeDriver.Create", &body(value)).unwrap().status, 400, "{value}");
    }
    plugin.create("x", &json!(null)).done();
    assert_eq!(plugin.mount("x", "a\nb").status, 400);
    assert_eq!(plugin.mount("x", &"a".repeat(257)).status, 400);
    plugin.remove("x").done();
    // A name that is printed as it was sent would begin a line of its own in the log.
    let log = std::fs::read_to_string(plugin.path("log")).unwrap();
    assert!(log.lines().all(|line| line.starts_with("nacre-volumes: ")), "{log}");
    plugin.nothing_is_left();
}

#[test]
fn a_request_of_a_mebibyte_is_refused_before_it_is_read() {
    needs!(as_root());
    let plugin = Plugin::new();
    let name = "a".repeat(1 << 20);
    assert_eq!(
        request(&plugin.socket(), "VolumeDriver.Create", &json!({ "Name": name }).to_string()).unwrap().status,
        413
    );
    // So much is not read to its end: the answer may be lost with the connection.
    let head = format!("POST /{name} HTTP/1.1\r\n\r\n");
    assert!(raw(&plugin.socket(), head.as_bytes()).is_none_or(|answer| answer.status == 431));
    plugin.create("small", &json!(null)).done();
    plugin.remove("small").done();
    plugin.nothing_is_left();
}

#[test]
fn clients_that_send_nothing_keep_nobody_waiting() {
    needs!(as_root());
    let plugin = Plugin::new();
    let idle: Vec<UnixStream> = (0..300)
        .map(|number| {
            let mut stream = UnixStream::connect(plugin.socket()).unwrap();
            if number % 2 == 0 {
                // Those that were cut before.
                let _ = stream.write_all(b"POST /Volume");
            }
            stream
        })
        .collect();
    plugin.create("one", &json!({ "size": "1M" })).done();
    plugin.mount("one", "a").done();
    plugin.unmount("one", "a").done();
    plugin.remove("one").done();
    drop(idle);
    plugin.nothing_is_left();
}
