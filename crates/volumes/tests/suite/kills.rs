//! The plugin killed by SIGKILL between and inside of calls: a call that is repeated succeeds, one that
//! is not leaves nothing.
//!
//! Inside of a call, a script in the place of `nacre` kills the plugin before or after the N-th
//! command; the command continues without the plugin, while the call is repeated. Rounds with kills
//! at any moment: `NACRE_VOLUMES_KILLS` makes a campaign of them.

use crate::fixture::{Plugin, as_root, eventually, nacre, needs, request};
use serde_json::{Value, json};
use std::{fs, os::unix::fs::PermissionsExt, sync::mpsc, time::Duration};

/// Puts a script in the place of nacre, which kills the plugin once.
fn kill_at(plugin: &mut Plugin, command: usize, moment: &str) {
    let (script, count) = (plugin.path("nacre"), plugin.path("count"));
    let text = format!(
        "#!/bin/sh
number=$(cat {count})
echo $((number + 1)) >{count}
[ $number != {command} ] || [ {moment} != before ] || kill -9 $PPID
{nacre} \"$@\"
code=$?
[ $number != {command} ] || [ {moment} != after ] || kill -9 $PPID
exit $code
",
        count = count.display(),
        nacre = nacre().display(),
    );
    fs::write(&count, "0\n").unwrap();
    // Beside and renamed: a script that is being executed cannot be written.
    let new = plugin.path("nacre.new");
    fs::write(&new, text).unwrap();
    fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
    fs::rename(new, &script).unwrap();
    plugin.nacre = script;
}

/// How many commands were called since [`kill_at`].
fn commands(plugin: &Plugin) -> usize {
    fs::read_to_string(plugin.path("count")).unwrap().trim().parse().unwrap()
}

/// A call. Where the plugin is killed, it is started again; the call is repeated where that is said.
/// Returns whether it was answered.
fn call(plugin: &mut Plugin, call: &str, body: &Value, repeated: bool) -> bool {
    let path = format!("VolumeDriver.{call}");
    match request(&plugin.socket(), &path, &body.to_string()) {
        Some(answer) => drop(answer.done()),
        None => {
            plugin.kill();
            plugin.start();
            if !repeated {
                return false;
            }
            request(&plugin.socket(), &path, &body.to_string()).unwrap().done();
        }
    }
    true
}

/// The life of a volume, killed at each command in turn; then without any.
fn lives(plugin: &mut Plugin, options: &Value) {
    let body = json!({ "Name": "volume", "ID": "a", "Opts": options });
    for repeated in [true, false] {
        for moment in ["before", "after"] {
            let mut command = 0;
            loop {
                kill_at(plugin, command, moment);
                plugin.kill();
                plugin.start();
                let mut whole = true;
                for step in ["Create", "Mount", "Unmount", "Remove"] {
                    whole = whole && call(plugin, step, &body, repeated);
                    if whole && step == "Mount" {
                        fs::write(plugin.at("volume").join("file"), "content").unwrap();
                        assert_eq!(plugin.mounts().len(), if body["Opts"]["mode"].is_null() { 1 } else { 2 });
                    }
                }
                let called = commands(plugin);
                if !whole {
                    // The commands of the killed plugin end by themselves: their lock is waited for.
                    plugin.unmount("volume", "a").done();
                    plugin.remove("volume").done();
                }
                assert_eq!(plugin.mounts(), Vec::<String>::new(), "{moment} command {command} of {called}");
                plugin.verb_done(&["tend"]);
                eventually("its directory is gone", || plugin.entries().iter().all(|name| name == "origin"));
                command += 1;
                if command > called {
                    break;
                }
            }
            assert!(command > 2, "commands were killed");
        }
    }
    plugin.nacre = nacre();
    plugin.kill();
    plugin.start();
}

#[test]
fn a_volume_in_a_directory_survives_kills_inside_of_calls() {
    needs!(as_root());
    let mut plugin = Plugin::new();
    lives(&mut plugin, &json!({ "size": "1M", "owner": "0:0" }));
    plugin.nothing_is_left();
}

#[test]
fn a_volume_in_a_pool_survives_kills_inside_of_calls() {
    needs!(as_root());
    let mut plugin = Plugin::new();
    let pool = plugin.pool("kill");
    lives(&mut plugin, &json!({ "pool": pool, "size": "4M", "mode": "u=rwX:g=:o=" }));
    plugin.nothing_is_left();
}

#[test]
fn a_clone_survives_kills_inside_of_calls() {
    needs!(as_root());
    let mut plugin = Plugin::new();
    let pool = plugin.pool("clone");
    plugin.create("origin", &json!({ "pool": pool })).done();
    let before = plugin.datasets(&pool);
    lives(&mut plugin, &json!({ "pool": pool, "from": "origin" }));
    assert_eq!(plugin.datasets(&pool), before);
    plugin.remove("origin").done();
    plugin.nothing_is_left();
}

/// Numbers that are the same each time.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
}

#[test]
fn kills_at_any_moment_lose_nothing_and_leave_nothing() {
    needs!(as_root());
    let mut plugin = Plugin::new();
    let pool = plugin.pool("any");
    let rounds: u64 = std::env::var("NACRE_VOLUMES_KILLS").map_or(12, |text| text.parse().unwrap());
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let volumes = [
        json!({ "Name": "cage", "ID": "a", "Opts": { "size": "1M" } }),
        json!({ "Name": "set", "ID": "a", "Opts": { "pool": pool, "quota": "8M" } }),
    ];
    let (answered, ends) = mpsc::channel::<()>();
    for round in 0..rounds {
        let body = &volumes[(round % 2) as usize];
        let name = body["Name"].as_str().unwrap();
        for step in ["Create", "Mount", "Unmount", "Mount", "Unmount", "Remove"] {
            let path = format!("VolumeDriver.{step}");
            let moment = Duration::from_micros(numbers.next() % 150_000);
            let socket = plugin.socket();
            let answer = std::thread::scope(|scope| {
                let sender = answered.clone();
                let (path, socket) = (&path, &socket);
                let caller = scope.spawn(move || {
                    let answer = request(socket, path, &body.to_string());
                    sender.send(()).unwrap();
                    answer
                });
                // The call's end, or the moment of the kill.
                if ends.recv_timeout(moment).is_err() {
                    plugin.kill();
                    ends.recv().unwrap();
                }
                caller.join().unwrap()
            });
            match answer {
                Some(answer) => drop(answer.done()),
                None => {
                    plugin.kill();
                    plugin.start();
                    request(&plugin.socket(), &path, &body.to_string()).unwrap().done();
                }
            }
            if step == "Mount" {
                let file = plugin.at(name).join("file");
                let before = fs::read(&file).unwrap_or_default();
                fs::write(&file, [before.as_slice(), b"x"].concat()).unwrap();
            }
            if step == "Unmount" {
                assert_eq!(plugin.mounts(), Vec::<String>::new(), "round {round}");
            }
        }
    }
    plugin.nothing_is_left();
}
