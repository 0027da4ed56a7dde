//! Growth and shrinking of trees: full leaves, limits, empty trees, bulk loads.

use super::*;

fn filled(bench: &Bench, tree: &Tree) -> f64 {
    let (used, count) = leaves(bench.ctx(), tree.root.as_ref().unwrap());
    used as f64 / (count * tree.settings.page) as f64
}

#[test]
fn rising_keys_leave_full_leaves() {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, Settings::with_page(4096));
    for n in 0..20_000u64 {
        tree.put(&bench.ctx(), Txg(1), &n.to_be_bytes(), &[1; 30]).unwrap();
    }
    assert!(filled(&bench, &tree) > 0.97, "{}", filled(&bench, &tree));
    assert_sound(bench.ctx(), &tree);
}

/// As in a dataset: inodes ascend while entries of several directories ascend after them, all in
/// one tree.
#[test]
fn rising_keys_between_others_leave_full_leaves() {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, Settings::with_page(4096));
    for n in 0..8000u64 {
        let mut key = vec![2];
        key.extend(n.to_be_bytes());
        tree.put(&bench.ctx(), Txg(1), &key, &[1; 60]).unwrap();
        let mut key = vec![3];
        key.extend((n % 3).to_be_bytes());
        key.extend(n.to_be_bytes());
        tree.put(&bench.ctx(), Txg(1), &key, &[2; 20]).unwrap();
        if n % 500 == 0 {
            bench.commit(&mut tree, 1);
        }
    }
    assert!(filled(&bench, &tree) > 0.93, "{}", filled(&bench, &tree));
    assert_sound(bench.ctx(), &tree);
}

#[test]
fn random_keys_leave_leaves_two_thirds_full() {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, Settings::with_page(4096));
    let mut random = Random(1);
    for _ in 0..20_000 {
        tree.put(&bench.ctx(), Txg(1), &random.next().to_be_bytes(), &[1; 30]).unwrap();
    }
    assert!((0.6..0.8).contains(&filled(&bench, &tree)), "{}", filled(&bench, &tree));
}

#[test]
fn a_tree_grows_high_and_goes_away() {
    for order in 0..3 {
        let bench = Bench::new();
        let mut tree = Tree::empty(1, Settings::with_page(256));
        let mut keys: Vec<u32> = (0..6000).collect();
        for key in &keys {
            tree.put(&bench.ctx(), Txg(1), &key.to_be_bytes(), &[9; 20]).unwrap();
        }
        assert!(height(bench.ctx(), &tree) >= 5);
        if order == 1 {
            keys.reverse();
        } else if order == 2 {
            let mut random = Random(3);
            for at in (1..keys.len()).rev() {
                keys.swap(at, below(&mut random, at + 1));
            }
        }
        if order > 0 {
            bench.commit(&mut tree, 1);
        }
        for (at, key) in keys.iter().enumerate() {
            assert!(tree.remove(&bench.ctx(), Txg(2), &key.to_be_bytes()).unwrap());
            if at == 5990 {
                assert!(height(bench.ctx(), &tree) <= 3, "9 rows in {} levels", height(bench.ctx(), &tree));
                assert_sound(bench.ctx(), &tree);
            }
        }
        assert!(tree.is_empty() && tree.dirty == 0);
        assert_eq!(bench.commit(&mut tree, 2).root, None);
        assert_eq!(tree.take_dead(Txg(2)).len(), bench.frames.written().len(), "everything that was written is dead");
    }
}

#[test]
fn limits_are_said() {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, Settings::default());
    assert_eq!((tree.settings().longest_key(), tree.settings().longest_row()), (1024, 8188));
    let ctx = bench.ctx();
    tree.put(&ctx, Txg(1), &[1; 1024], &[2; 8188 - 1024]).unwrap();
    tree.put(&ctx, Txg(1), b"", b"the empty key is the first").unwrap();
    for (key, value) in [(1025, 0), (1, 8188)] {
        let error = tree.put(&ctx, Txg(1), &vec![1; key], &vec![2; value]).unwrap_err();
        assert!(matches!(&error, PoolError::Refused(text) if text.contains("at most")), "{error}");
    }
    assert_eq!(tree.first(&ctx).unwrap().unwrap().0, b"");
    assert_eq!(rows_of(ctx, &tree.view()).len(), 2);
}

#[test]
fn rows_of_the_largest_size_split_anywhere() {
    let bench = Bench::new();
    let settings = Settings::default();
    let mut tree = Tree::empty(1, settings);
    let (mut map, mut random) = (Map::new(), Random(5));
    for _ in 0..600 {
        let key = below(&mut random, 200).to_be_bytes().to_vec();
        let value = vec![random.next() as u8; below(&mut random, settings.longest_row() - key.len() + 1)];
        tree.put(&bench.ctx(), Txg(1), &key, &value).unwrap();
        map.insert(key, value);
    }
    assert_sound(bench.ctx(), &tree);
    bench.commit(&mut tree, 1);
    assert_rows(bench.ctx(), &tree.view(), &map, "large rows");
}

#[test]
fn loading_makes_the_same_rows_in_full_leaves() {
    let bench = Bench::new();
    for (page, count) in [(256, 0), (256, 1), (256, 5), (256, 7000), (4096, 20_000)] {
        let settings = Settings::with_page(page);
        let mut loader = Tree::load_sorted(bench.ctx(), 3, settings, form(4));
        let mut map = Map::new();
        let before = bench.frames.written().len();
        for n in 0..count as u32 {
            let (key, value) = (n.to_be_bytes().to_vec(), vec![n as u8; n as usize % 25]);
            loader.push(&key, &value).unwrap();
            map.insert(key, value);
        }
        let written = loader.finish().unwrap();
        let frames = &bench.frames.written()[before..];
        assert_eq!(written.frames, frames.len() as u64);
        assert_eq!(written.bytes, frames.iter().map(|(pointer, _)| pointer.charged()).sum::<u64>());
        let mut tree = Tree::loaded(&written, 3, settings);
        assert_rows(bench.ctx(), &tree.view(), &map, "loaded");
        assert_sound(bench.ctx(), &tree);
        if count > 1000 {
            assert!(filled(&bench, &tree) > 0.9, "{}", filled(&bench, &tree));
            for n in 0..500u32 {
                let key = (n * 7).to_be_bytes().to_vec();
                tree.put(&bench.ctx(), Txg(5), &key, b"changed").unwrap();
                map.insert(key, b"changed".to_vec());
            }
            assert_rows(bench.ctx(), &tree.view(), &map, "changed after loading");
        }
    }
}

#[test]
fn loading_refuses_what_is_not_in_order() {
    let bench = Bench::new();
    let mut loader = Tree::load_sorted(bench.ctx(), 3, Settings::default(), form(1));
    loader.push(b"b", b"").unwrap();
    assert!(matches!(loader.push(b"b", b""), Err(PoolError::Refused(_))));
    assert!(matches!(loader.push(b"a", b""), Err(PoolError::Refused(_))));
    assert!(matches!(loader.push(&[b'c'; 2000], b""), Err(PoolError::Refused(_))));
}

#[test]
fn the_end_of_a_prefix() {
    assert_eq!(after_prefix(&[1, 2]), Some(vec![1, 3]));
    assert_eq!(after_prefix(&[1, 255, 255]), Some(vec![2]));
    assert_eq!(after_prefix(&[255]), None);
    assert_eq!(after_prefix(&[]), None);
}

/// Bytes before compression that a few scattered changes of keys of one kind write.
fn written_for_changes_all_over(settings: Settings) -> u64 {
    let bench = Bench::new();
    let mut tree = Tree::empty(1, settings);
    let mut random = Random(7);
    let mut put = |tree: &mut Tree, txg, number: u64| {
        tree.put(&bench.ctx(), Txg(txg), &[&[1], &number.to_be_bytes()[..]].concat(), &[5; 10]).unwrap();
        tree.put(&bench.ctx(), Txg(txg), &[&[2], &random.next().to_be_bytes()[..]].concat(), &[5; 10]).unwrap();
    };
    (0..20_000).for_each(|number| put(&mut tree, 1, number));
    bench.commit(&mut tree, 1);
    (20_000..20_015).for_each(|number| put(&mut tree, 2, number));
    assert_sound(bench.ctx(), &tree);
    bench.commit(&mut tree, 2).logical
}

#[test]
fn changes_all_over_keys_of_small_leaves_have_little_written() {
    let (plain, small) = (Settings::default(), Settings::default().with_scattered(2, 4 << 10));
    let (plain, small) = (written_for_changes_all_over(plain), written_for_changes_all_over(small));
    assert!(small < plain / 3, "{small} bytes instead of {plain}");
}
