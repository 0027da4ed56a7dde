//! Every call of the protocol, by a client of our own.

use crate::fixture::{Plugin, as_root, needs, raw, request};
use serde_json::json;
use std::{
    fs,
    io::{ErrorKind, Write},
    os::unix::fs::MetadataExt,
};

#[test]
fn the_plugin_says_what_it_is() {
    needs!(as_root());
    let plugin = Plugin::new();
    let activated = request(&plugin.socket(), "Plugin.Activate", "").unwrap().done();
    assert_eq!(activated["Implements"], json!(["VolumeDriver"]));
    assert_eq!(plugin.call("Capabilities", &json!({})).done()["Capabilities"]["Scope"], "local");
    assert_eq!(plugin.call("List", &json!({})).done()["Volumes"], json!([]));
    assert_eq!(request(&plugin.socket(), "VolumeDriver.Fly", "{}").unwrap().status, 404);
}

#[test]
fn a_volume_with_a_size_lives_and_goes() {
    needs!(as_root());
    let plugin = Plugin::new();
    let options = json!({ "size": "1M", "files": "5", "owner": "1234:1235", "mode": "u=rwX:g=rX:o=" });
    plugin.create("one", &options).done();
    // Again with the same options, and with others.
    plugin.create("one", &options).done();
    assert!(plugin.create("one", &json!({ "size": "2M" })).refused().contains("other options"));
    assert!(plugin.mounts().is_empty());
    let at = plugin.at("one");
    for id in ["a", "a", "b"] {
        assert_eq!(plugin.mount("one", id).done()["Mountpoint"], at.to_str().unwrap());
    }
    assert_eq!(plugin.mounts().len(), 1);
    assert_eq!(plugin.call("Path", &json!({ "Name": "one" })).done()["Mountpoint"], at.to_str().unwrap());
    // What a container sees, and where it is full: for itself.
    let mut file = fs::File::create(at.join("file")).unwrap();
    let metadata = fs::metadata(at.join("file")).unwrap();
    assert_eq!((metadata.uid(), metadata.gid(), metadata.mode() & 0o777), (1234, 1235, 0o640));
    for number in 1..5 {
        fs::create_dir(at.join(number.to_string())).unwrap();
    }
    assert_eq!(fs::create_dir(at.join("5")).unwrap_err().kind(), ErrorKind::StorageFull);
    let full = file.write_all(&vec![7; 2 << 20]).unwrap_err();
    assert_eq!(full.kind(), ErrorKind::StorageFull);
    plugin.create("two", &json!({ "size": "1M" })).done();
    plugin.mount("two", "c").done();
    fs::write(plugin.at("two").join("file"), vec![7; 900 << 10]).unwrap();
    // What is known of it.
    let got = plugin.get("one").done();
    let status = &got["Volume"]["Status"];
    let used = status["used"].as_u64().unwrap();
    assert_eq!(status["limit"], 1 << 20);
    assert!((1000 << 10..=1 << 20).contains(&used), "{used}");
    assert_eq!((status["inodes"].as_u64(), status["inode-limit"].as_u64()), (Some(5), Some(5)));
    assert_eq!(status["mounted-by"], 2);
    let list = plugin.call("List", &json!({})).done();
    let names: Vec<&str> =
        list["Volumes"].as_array().unwrap().iter().map(|row| row["Name"].as_str().unwrap()).collect();
    assert_eq!(names, ["one", "two"]);
    let metrics = raw(&plugin.socket(), b"GET /metrics HTTP/1.1\r\n\r\n").unwrap().body;
    let metrics = metrics.as_str().unwrap();
    for line in [
        &format!("nacre_volume_used_bytes{{volume=\"one\"}} {used}"),
        "nacre_volume_inodes{volume=\"one\"} 5",
        "nacre_volume_mounted{volume=\"two\"} 1",
        "nacre_volume_holders{volume=\"one\"} 2",
    ] {
        assert!(metrics.lines().any(|one| one == line), "{line} in {metrics}");
    }
    assert_eq!(plugin.verb_done(&["metrics"]), metrics);
    assert!(plugin.verb_done(&["list"]).contains("one  "), "{}", plugin.verb_done(&["list"]));
    // A caller that unmounts twice takes nothing from another one.
    drop(file);
    plugin.unmount("one", "a").done();
    plugin.unmount("one", "a").done();
    assert_eq!(plugin.mounts().len(), 2);
    assert!(plugin.remove("one").refused().contains("mounted by 1"));
    plugin.unmount("one", "b").done();
    assert_eq!(plugin.mounts().len(), 1);
    // Its files are there again.
    plugin.mount("one", "d").done();
    assert!(fs::metadata(at.join("file")).unwrap().len() > 900 << 10);
    plugin.unmount("one", "d").done();
    plugin.unmount("two", "c").done();
    for name in ["one", "two", "one", "never"] {
        plugin.remove(name).done();
    }
    assert!(plugin.get("one").refused().contains("no volume"));
    assert!(plugin.mount("one", "a").refused().contains("no volume"));
    plugin.nothing_is_left();
}

#[test]
fn a_volume_without_options_is_a_directory() {
    needs!(as_root());
    let plugin = Plugin::new();
    plugin.create("plain", &json!(null)).done();
    let at = plugin.mount("plain", "a").done()["Mountpoint"].as_str().unwrap().to_owned();
    assert!(plugin.mounts().is_empty());
    fs::write(format!("{at}/file"), "content").unwrap();
    plugin.unmount("plain", "a").done();
    plugin.remove("plain").done();
    assert!(!fs::exists(at).unwrap());
    plugin.nothing_is_left();
}

#[test]
fn a_busy_volume_stays_until_its_files_are_closed() {
    needs!(as_root());
    let plugin = Plugin::new();
    plugin.create("busy", &json!({ "size": "1M" })).done();
    plugin.mount("busy", "a").done();
    let file = fs::File::create(plugin.at("busy").join("file")).unwrap();
    assert!(!plugin.unmount("busy", "a").refused().is_empty());
    assert_eq!(plugin.mounts().len(), 1);
    drop(file);
    // Nobody holds it: the next round ends the mount.
    plugin.verb_done(&["tend"]);
    assert!(plugin.mounts().is_empty());
    plugin.unmount("busy", "a").done();
    plugin.remove("busy").done();
    plugin.nothing_is_left();
}

#[test]
fn mounts_outlive_the_plugin_and_end_with_the_boot() {
    needs!(as_root());
    let mut plugin = Plugin::new();
    plugin.create("kept", &json!({ "size": "1M" })).done();
    plugin.mount("kept", "a").done();
    let mut file = fs::File::create(plugin.at("kept").join("file")).unwrap();
    plugin.kill();
    file.write_all(b"while it is away").unwrap();
    plugin.start();
    plugin.verb_done(&["tend"]);
    file.write_all(b", and after").unwrap();
    drop(file);
    assert!(plugin.remove("kept").refused().contains("mounted by 1"));
    plugin.kill();
    // Another boot: nothing is mounted, and the record is that of the last one.
    crate::fixture::run_nacre(&["umount", plugin.at("kept").to_str().unwrap()]);
    let record = plugin.path("state/volumes/kept/record.json");
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let text = fs::read_to_string(&record).unwrap();
    assert!(text.contains(boot.trim()));
    fs::write(&record, text.replace(boot.trim(), "another boot")).unwrap();
    plugin.start();
    plugin.mount("kept", "b").done();
    assert_eq!(fs::read(plugin.at("kept").join("file")).unwrap(), b"while it is away, and after");
    plugin.unmount("kept", "b").done();
    assert!(plugin.mounts().is_empty(), "the holder of the other boot is gone");
    plugin.remove("kept").done();
    plugin.nothing_is_left();
}

#[test]
fn a_mount_whose_processes_died_is_made_anew() {
    needs!(as_root());
    let plugin = Plugin::new();
    plugin.create("dead", &json!({ "size": "1M" })).done();
    plugin.mount("dead", "a").done();
    fs::write(plugin.at("dead").join("file"), "content").unwrap();
    let status: serde_json::Value =
        serde_json::from_str(&crate::fixture::run_nacre(&["status", "--json", plugin.at("dead").to_str().unwrap()]))
            .unwrap();
    let guardian = status[0]["survives"]["guardian"].as_i64();
    for pid in guardian.into_iter().chain(status[0]["pid"].as_i64()) {
        let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
    crate::fixture::eventually("the mount is dead", || fs::read_dir(plugin.at("dead")).is_err());
    plugin.mount("dead", "b").done();
    assert_eq!(fs::read(plugin.at("dead").join("file")).unwrap(), b"content");
    plugin.verb_done(&["release", "dead"]);
    assert!(plugin.mounts().is_empty());
    assert_eq!(plugin.verb(&["release", "never"]).status.code(), Some(3));
    plugin.remove("dead").done();
    plugin.nothing_is_left();
}

#[test]
fn two_processes_serve_one_state_directory() {
    needs!(as_root());
    let plugin = Plugin::new();
    let other = plugin.path("other.sock");
    let mut child = plugin.spawn(&other);
    crate::fixture::eventually("the other one answers", || request(&other, "Plugin.Activate", "").is_some());
    let sockets = [plugin.socket(), other];
    let rounds = |number: usize| {
        let socket = &sockets[number % 2];
        let body = json!({ "Name": "shared", "ID": format!("caller-{number}"), "Opts": { "size": "1M" } }).to_string();
        for _ in 0..5 {
            // Another one may have removed it since it was created.
            loop {
                request(socket, "VolumeDriver.Create", &body).unwrap().done();
                let answer = request(socket, "VolumeDriver.Mount", &body).unwrap();
                if answer.status == 200 {
                    break;
                }
                assert!(answer.refused().contains("no volume"));
            }
            fs::write(plugin.at("shared").join(format!("file-{number}")), "content").unwrap();
            request(socket, "VolumeDriver.Unmount", &body).unwrap().done();
            let removed = request(socket, "VolumeDriver.Remove", &body).unwrap();
            if removed.status != 200 {
                assert!(removed.refused().contains("mounted by"));
            }
        }
    };
    std::thread::scope(|scope| {
        for number in 0..4 {
            scope.spawn(move || rounds(number));
        }
    });
    child.kill().unwrap();
    child.wait().unwrap();
    plugin.remove("shared").done();
    plugin.nothing_is_left();
}
